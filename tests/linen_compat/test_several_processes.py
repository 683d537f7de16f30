"""Checkpoints that two processes save and load, as on two hosts."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from helpers import assert_close, hosts_of, mesh_of
from maxtext_data import read

from linen_compat import load_train_state, save_train_state
from nnx_pipeline import preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.train import TrainState, make_state

pytestmark = pytest.mark.slow
SMALL = {
    "model.vocab_size": "64",
    "model.embed_dim": "32",
    "model.num_layers": "3",  # which do not split over two stages
    "model.mlp_dim": "32",
    "pipeline.stage_layers": "auto",
}
CONFIG = apply_overrides(preset("tiny"), SMALL)
CASES = {"stage=2,fsdp=2": "nnx", "fsdp=4": "maxtext:scanned"}
SHARES = {"stage=2,fsdp=2": 2 / 3, "fsdp=4": 1 / 2}  # the largest: a stage has two layers of three
HOST = f"""
import json, resource, sys
import jax
from flax import nnx

port, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from linen_compat import load_train_state, save, save_train_state
from linen_compat.checkpoints import _offered as offered
from linen_compat.formats._orbax.parts import Part
from nnx_pipeline import MeshConfig, Mixtral, make_mesh, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.train import make_state, several_processes
from nnx_pipeline.train._saved import Origin

config = apply_overrides(preset("tiny"), {SMALL})

def saved():
    for mesh, format in {CASES}.items():
        grid = make_mesh(MeshConfig.parse(mesh), jax.devices())
        with jax.set_mesh(grid):
            state = make_state(config, grid, seed=0)
        save_train_state(state, f"{{folder}}/{{mesh}}", format)
        loaded = load_train_state(f"{{folder}}/alone-{{mesh}}", config, mesh=grid)
        save_train_state(loaded, f"{{folder}}/again-{{mesh}}", format)
    return state, loaded

def saved_in_background(state):
    about = (f"{{folder}}/run", config, Origin(0, None))
    with offered.claimed(about[0]):
        offered.begin(*about)
        write = offered.save_step(state, *about, copies={{}})
        for array in jax.tree.leaves(state):
            array.delete()  # as the next step of a training does
        offered.agree(write)
        assert offered.saved_run(about[0]).step == 0

def told_by(call):
    try:
        call()
    except (ValueError, OSError) as error:
        return str(error)

def refused(state):
    least = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # whose disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, least[1]))
    yield told_by(lambda: save_train_state(state, f"{{folder}}/full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, least)
    yield told_by(lambda: save(state.model, f"{{folder}}/whole", format="huggingface"))
    if rank == 1:  # which does not share the file system
        Part.can_begin = lambda part, folder: False
        offered._saved_run = lambda folder: None
    yield told_by(lambda: save_train_state(state, f"{{folder}}/unseen"))
    yield told_by(lambda: offered.saved_run(f"{{folder}}/run"))

with several_processes(f"127.0.0.1:{{port}}", processes=2, rank=rank):
    first, second = saved()
    saved_in_background(first)
    if rank == 0:
        save(Mixtral(config, rngs=nnx.Rngs(0)), f"{{folder}}/own", format="nnx")
    print("found", json.dumps([*refused(second)]))
"""


class Ended(NamedTuple):
    folder: Path
    told: list[list[str | None]]  # by each process


def state_on(mesh: str) -> TrainState:
    grid = mesh_of(mesh)
    with jax.set_mesh(grid):
        return make_state(CONFIG, grid, seed=0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("shared")
    for mesh, format in CASES.items():
        save_train_state(state_on(mesh), folder / f"alone-{mesh}", format)
    with hosts_of(HOST, str(folder)) as hosts:
        said = [host.communicate(timeout=600) for host in hosts]
    for out, error in said:
        assert "found" in out, error[-4000:]
    return Ended(folder, [json.loads(out.split("found ", 1)[1]) for out, _ in said])


@pytest.mark.parametrize("mesh", CASES)
def test_two_processes_save_and_load_as_one(mesh: str, ended: Ended) -> None:
    """To the bit, by Orbax and by this project; each process writes its share."""
    folder, format = ended.folder, CASES[mesh]
    alone = read(folder / f"alone-{mesh}")
    assert_close(read(folder / mesh), alone, 0.0)
    assert_close(read(folder / f"again-{mesh}"), alone, 0.0)
    loaded = load_train_state(folder / mesh, CONFIG, mesh=mesh_of("data=2,tensor=2"))
    save_train_state(loaded, folder / f"one-{mesh}", format)
    assert_close(read(folder / f"one-{mesh}"), alone, 0.0)
    sizes = [size_of(folder / mesh / f"ocdbt.process_{number}") for number in range(2)]
    assert max(sizes) < 1.1 * SHARES[mesh] * sum(sizes)
    assert sum(sizes) < 1.3 * size_of(folder / f"alone-{mesh}")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_save_in_the_background_is_one_in_the_foreground(ended: Ended) -> None:
    items = ended.folder / "run" / "0" / "items"
    save_train_state(state_on("fsdp=4"), ended.folder / "foreground", "nnx")
    assert_close(read(items), read(ended.folder / "foreground"), 0.0)
    assert len([*items.glob("ocdbt.process_*")]) == 2


def test_what_two_processes_are_refused(ended: Ended) -> None:
    """Both of them, in the same words, and nothing is left; one alone can save what it holds."""
    assert ended.told[0] == ended.told[1]
    full, whole, unseen, other = ended.told[0]
    assert full.startswith("process 1 of 2: ")
    assert "File too large" in full
    assert "is sharded over several processes, but one process must write this" in whole
    assert "is not seen by process 1, or cannot be written by it; choose a folder" in unseen
    assert f"{ended.folder / 'run'} is not to process 1 what it is to process 0" in other
    left = {path.name for path in ended.folder.iterdir()}
    assert "own" in left
    assert not any(name.startswith(("full", "whole", "unseen")) for name in left)
