"""Checkpoints that several processes write: their parts, made here by threads of one process."""

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import Run, assert_close, mesh_of
from maxtext_data import read

from linen_compat import load_train_state, save_train_state
from linen_compat.checkpoints.saving import layout_for
from linen_compat.checkpoints.train_state import source_of
from linen_compat.formats._in_memory import ModelSource, Shards
from linen_compat.formats._orbax import new_arrays
from linen_compat.formats._orbax.parts import Part
from linen_compat.formats._orbax.stream import OrbaxDestination
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.train import TrainState, make_state

pytestmark = pytest.mark.numbers
MESH = "stage=2,fsdp=2"
SMALL = {
    "model.vocab_size": "64",
    "model.embed_dim": "32",
    "model.num_layers": "2",
    "model.mlp_dim": "32",
}
UNEVEN = {"model.num_layers": "3", "pipeline.stage_layers": "auto"}
CONFIG = apply_overrides(preset("tiny"), SMALL)


@pytest.fixture(scope="module")
def state() -> TrainState:
    return state_of(CONFIG)


def state_of(config: object) -> TrainState:
    mesh = mesh_of(MESH)
    with jax.set_mesh(mesh):
        return make_state(config, mesh, seed=0)


def shards_in(process: int, count: int, array: jax.Array) -> Shards:
    """What one of the processes holds of an array of this one."""
    devices = [*mesh_of(MESH).devices.flat]
    own = devices[process::count]
    pieces = [
        (shard.index, np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0 and shard.device in own
    ]
    whole = Shards.of(array, turn=0, copies=None)
    return Shards(whole.shape, whole.dtype, whole.shard, tuple(pieces))


def part_of(process: int, count: int, state: TrainState, format: str) -> ModelSource:
    source = source_of(state, format)
    source._arrays = {
        part: {path: shards_in(process, count, leaf) for path, leaf in leaves.items()}
        for part, leaves in source._arrays.items()
    }
    return source


def write_in_parts(
    state: TrainState, folder: Path, format: str = "nnx", count: int = 2
) -> list[BaseException | None]:
    """Writes all parts at once; returns what each has raised."""
    folder.mkdir()
    layout = layout_for(state.model, format, None, None)

    def write(process: int) -> None:
        source, part = part_of(process, count, state, format), Part(process, count, "mark")
        destination = OrbaxDestination(source, folder, layout, part=part)
        destination.write_own(source)
        destination.commit(source.scalars)

    with ThreadPoolExecutor(count) as threads:
        return [one.exception() for one in [threads.submit(write, n) for n in range(count)]]


@pytest.mark.parametrize("block", [2**24, 2**12], ids=["whole", "cut"])
@pytest.mark.parametrize("format", ["nnx", "maxtext:scanned", "maxtext:unscanned"])
def test_parts_are_the_checkpoint_of_one_process(
    format: str, block: int, state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, by Orbax, and no file holds what two processes wrote."""
    monkeypatch.setattr(new_arrays, "_BLOCK_BYTES", block)
    assert write_in_parts(state, tmp_path / "parts", format) == [None, None]
    save_train_state(state, tmp_path / "whole", format)
    assert_close(read(tmp_path / "parts"), read(tmp_path / "whole"), 0.0)
    sizes = [size_of(tmp_path / "parts" / f"ocdbt.process_{number}") for number in range(2)]
    assert max(sizes) < 0.6 * sum(sizes)
    assert sum(sizes) < 1.3 * size_of(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        *("_METADATA", "d", "manifest.ocdbt", "ocdbt.process_0", "ocdbt.process_1")
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("shard", "block"),
    [
        ([1, 4096, 2048], [1, 2048, 2048]),
        ([50257, 512], [1733, 512]),
        ([32003, 512], [32003, 128]),  # a prime number of rows
        ([4, 0], [4, 0]),
    ],
)
def test_chunks_divide_what_a_device_holds(shard: list[int], block: list[int]) -> None:
    assert new_arrays._block(shard, np.dtype(np.float32), even=True) == block


def test_parts_of_uneven_stages_on_another_mesh(tmp_path: Path) -> None:
    config = apply_overrides(preset("tiny"), {**SMALL, **UNEVEN})
    state = state_of(config)
    assert write_in_parts(state, tmp_path / "parts", count=4) == [None] * 4
    loaded = load_train_state(tmp_path / "parts", config, mesh=mesh_of("fsdp=4"))
    save_train_state(loaded, tmp_path / "again")
    save_train_state(state, tmp_path / "whole")
    assert_close(read(tmp_path / "again"), read(tmp_path / "whole"), 0.0)


def damage_folder(items: Path) -> None:
    shutil.rmtree(items / "ocdbt.process_1")


def empty_folder(items: Path) -> None:
    damage_folder(items)
    (items / "ocdbt.process_1").mkdir()


def lose_a_file(items: Path) -> None:
    max((items / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size).unlink()


def flip_a_bit(items: Path) -> None:
    file = max((items / "ocdbt.process_1" / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


OF_1 = r"ocdbt.process_1(/d)?, which process 1 of 2 wrote"
LACKS = f"lacks {OF_1}"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_folder, LACKS),
        (empty_folder, LACKS),
        (lose_a_file, f"lacks 1 file of {OF_1}"),
        (flip_a_bit, "the checkpoint is damaged"),
    ],
)
def test_a_part_that_is_missing_or_damaged(
    damage: Callable[[Path], None], told: str, state: TrainState, tmp_path: Path, bridge: Run
) -> None:
    parts = tmp_path / "parts"
    assert write_in_parts(state, parts) == [None, None]
    damage(parts)
    with pytest.raises(Mismatch, match=told):
        load_train_state(parts, CONFIG, mesh=mesh_of(MESH))
    commands = [("convert", parts, tmp_path / "out", "--to", "maxtext:scanned")]
    if told.startswith("lacks"):
        commands += [("inspect", parts), ("check", parts, "--config", "tiny")]
    for words in commands:
        ended = bridge(*words)
        assert ended.code == 1
        assert re.search(told, ended.err), ended.err
    assert not (tmp_path / "out").exists()


def test_a_part_that_cannot_be_written(
    state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process says which one it was, and there is no checkpoint."""
    (tmp_path / "parts").mkdir()
    source, part = part_of(0, 2, state, "nnx"), Part(0, 2, "mark")
    Part(1, 2, "mark").fail(tmp_path / "parts", OSError("no space is left"))
    layout = layout_for(state.model, "nnx", None, None)
    destination = OrbaxDestination(source, tmp_path / "parts", layout, part=part)
    destination.write_own(source)
    with pytest.raises(Mismatch, match="process 1 of 2: no space is left"):
        destination.commit(source.scalars)
    assert not (tmp_path / "parts" / "_METADATA").exists()


def test_chunks_that_nobody_has_written(state: TrainState, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    source, part = part_of(0, 2, state, "nnx"), Part(0, 1, "mark")
    layout = layout_for(state.model, "nnx", None, None)
    destination = OrbaxDestination(source, tmp_path / "parts", layout, part=part)
    destination.write_own(source)
    with pytest.raises(RuntimeError, match="chunks were written"):
        destination.commit(source.scalars)
