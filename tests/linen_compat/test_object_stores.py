"""Checkpoints in `gs://` and `s3://`, on servers of this machine, and in `file://`."""

import contextlib
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import fsspec
import gcsfs
import numpy as np
import pytest
from helpers import small_config
from huggingface_reference import FOLDER
from maxtext_data import (
    Leaves,
    assert_same_leaves,
    checkpoint,
    config_of,
    full_state,
    nested,
    read,
    state_in,
)
from maxtext_data import (
    write as write_by_orbax,
)
from object_stores import BUCKET, SERVERS, Server, environment

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kill_stores

import linen_compat
from linen_compat.formats import _new_folder as folders
from linen_compat.formats import _paths as paths
from linen_compat.formats import _store_folder as stores
from linen_compat.formats._new_folder import Room, new_folder
from linen_compat.formats._orbax.corruption import check_index
from linen_compat.formats._orbax.inspect import find_items
from linen_compat.formats._orbax.new_arrays import NewArrays
from linen_compat.formats._orbax.parts import Part
from linen_compat.formats._streams import Mismatch
from nnx_pipeline import InputError
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath
from nnx_pipeline.lab.errors import Unavailable
from nnx_pipeline.train._cli import checkpoints as offers

SOURCE = checkpoint("unscanned") / "2" / "items"
CONFIG = checkpoint("unscanned").parent / "config.yml"
LLAMA = FOLDER / "llama"


class Store(NamedTuple):
    """A bucket on a running server."""

    scheme: str
    server: Server

    def path(self, name: str = "") -> StorePath:
        return place(f"{self.scheme}://{BUCKET}/{name}")

    def names(self, name: str) -> list[str]:
        """The objects in a folder but for the values of arrays, whose names are random."""
        folder = self.path(name)
        below = (str(path).removeprefix(f"{folder}/") for path in folder.below())
        return sorted(name for name in below if not f"/{name}".rpartition("/d/")[1])

    def put(self, folder: Path, name: str) -> StorePath:
        """Copies a folder of this machine, as other programs do."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.path(f"{name}/{file.relative_to(folder)}").upload(file)
        return self.path(name)

    def read(self, name: str, tmp_path: Path) -> Leaves:
        """The leaves of a checkpoint as Orbax reads them, of `s3://` from a copy."""
        if self.scheme == "gs":
            return read(str(self.path(name)))
        copy = tmp_path / "copy"
        for path in self.path(name).below():
            file = copy / str(path).removeprefix(f"{self.path(name)}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(path.read_bytes())
        return read(copy)


@pytest.fixture(scope="session", params=SERVERS)
def running(request: pytest.FixtureRequest) -> Iterator[Store]:
    with SERVERS[request.param]() as server:
        yield Store(request.param, server)


@pytest.fixture
def store(running: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket that this process reaches."""
    for name, value in environment(running.scheme, running.server.url).items():
        monkeypatch.setenv(name, value)
    for kind in SERVERS:
        fsspec.get_filesystem_class(kind).clear_instance_cache()
    running.server.reset()
    yield running
    fsspec.get_filesystem_class(running.scheme).clear_instance_cache()


def test_a_maxtext_checkpoint_goes_in_and_out(store: Store, bridge, tmp_path: Path) -> None:
    """What Orbax reads there too, whole with its marker."""
    there = store.path("runs/1")
    assert bridge("convert", SOURCE, there, "--to", "maxtext:scanned").code == 0
    assert store.names("runs/1") == ["_METADATA", "commit_success.txt", "manifest.ocdbt"]
    assert_same_leaves(store.read("runs/1", tmp_path), state_in("scanned"))
    assert "maxtext:scanned: 4 layers" in bridge("inspect", f"{there}/").out
    ended = bridge("check", there, "--config", CONFIG, "--read", "--json", "-")
    assert (ended.code, ended.json["fits"], ended.json["checkpoint"]) == (0, True, str(there))
    assert bridge("convert", there, tmp_path / "back", "--to", "maxtext:unscanned").code == 0
    assert_same_leaves(read(tmp_path / "back"), full_state())


def test_what_orbax_has_written_there(store: Store, bridge) -> None:
    import orbax.checkpoint as ocp

    if store.scheme == "s3":
        pytest.skip("Orbax has no s3://")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(str(store.path("run/3/items")), nested(full_state()))
    assert "commit_success.txt" in store.names("run/3/items")
    ended = bridge("check", store.path("run/3/items"), "--config", CONFIG, "--read")
    assert ended.code == 0, ended.err


def test_a_hugging_face_folder_goes_in_and_out(store: Store, bridge, tmp_path: Path) -> None:
    there = store.path("llama")
    assert bridge("convert", LLAMA, there, "--to", "huggingface").code == 0
    assert bridge("convert", LLAMA, tmp_path / "here", "--to", "huggingface").code == 0
    assert store.names("llama") == sorted(os.listdir(tmp_path / "here"))
    for file in (tmp_path / "here").iterdir():
        assert (there / file.name).read_bytes() == file.read_bytes(), file
    model, again = linen_compat.load(LLAMA), linen_compat.load(str(there))
    assert model.config == again.config
    np.testing.assert_array_equal(model.head[...], again.head[...])
    assert bridge("check", there, "--config", there, "--read").code == 0
    assert bridge("convert", there, tmp_path / "back", "--to", "huggingface").code == 0
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_an_adapter_of_maxtext(store: Store, tmp_path: Path) -> None:
    query, here = "decoder/layers/self_attention/query/kernel_lora_", tmp_path / "adapter"
    shapes = {"a": (16, 4, 2), "b": (2, 4, 24)}
    write_by_orbax(
        here, {query + name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    )
    (here / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 3}')
    (here / "commit_success.txt").touch()  # which not every version of Orbax writes here
    one, other = (
        linen_compat.load(LLAMA, adapter=folder) for folder in (here, store.put(here, "adapter"))
    )
    kernels = [model.pipeline.layers.attention.query[...] for model in (one, other)]
    np.testing.assert_array_equal(*kernels)


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen3"])
def test_parts_of_tensors(store: Store, kind: str) -> None:
    """As they are read for the shards of a mesh, equal to those of a file."""
    from linen_compat.formats.huggingface._folder import TensorFolder

    here, there = TensorFolder(FOLDER / kind), TensorFolder(store.put(FOLDER / kind, kind))
    assert here.specs == there.specs
    for name, spec in here.specs.items():
        cuts = [(), tuple(slice(size // 2, size) for size in spec.shape)]
        for cut in cuts:
            one, other = here.read(name, cut), there.read(name, cut)
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), (name, cut)


@pytest.mark.slow(but=1)
def test_functions_save_and_load(store: Store) -> None:
    state = linen_compat.load_train_state(checkpoint("unscanned"), config_of())
    for name, kind in (("scanned", "maxtext:scanned"), ("nnx", "nnx")):
        linen_compat.save_train_state(state, store.path(name), kind)
        again = linen_compat.load_train_state(str(store.path(name)), config_of())
        np.testing.assert_array_equal(again.model.head[...], state.model.head[...])
        assert int(again.step) == int(state.step)
    linen_compat.save(state.model, str(store.path("model")), "nnx")
    model = linen_compat.load(str(store.path("model")), config_of())
    np.testing.assert_array_equal(model.head[...], state.model.head[...])


@pytest.mark.slow(but=1)
def test_a_training_goes_on_and_is_read(store: Store, run, tmp_path: Path) -> None:
    """With the same losses as in a folder of this machine."""
    words = ("train", "--model", "tiny", "--set", "model.num_layers=2", "--save-every", "1")
    words += ("--set", "model.vocab_size=256", "--mesh", "stage=2", "--json", "-")
    losses = {}
    for folder in (str(store.path("run")), str(tmp_path / "run")):
        first = run(*words, "--steps", 2, "--checkpoint-dir", folder)
        assert first.code == 0, first.err
        again = run(*words, "--steps", 3, "--checkpoint-dir", folder)
        assert (again.code, "holds a run up to step 2" in again.err) == (2, True)
        second = run(*words, "--steps", 3, "--checkpoint-dir", folder, "--resume")
        losses[folder] = first.json["losses"] + second.json["losses"]
        ended = run("generate", "--checkpoint", folder, "--prompt", "a", "--new-tokens", 2)
        assert (ended.code, ended.out[0]) == (0, "a")
    one, other = losses.values()
    assert (one, len(one)) == (other, 3)
    of_items = ["_METADATA", "commit_success.txt", "manifest.ocdbt"]
    of_step = ["commit_success.txt", *(f"items/{name}" for name in of_items)]
    steps = [f"{step}/{name}" for step in (1, 2, 3) for name in of_step]
    assert store.names("run") == sorted([*steps, "config.yml", "training.yml"])


def test_generate_reads_a_hugging_face_folder(store: Store, run) -> None:
    words = ("generate", "--tokens", "1,2", "--new-tokens", 3)
    there = run(*words, "--checkpoint", store.put(LLAMA, "llama"))
    assert (there.code, there.out) == (0, run(*words, "--checkpoint", LLAMA).out)


@pytest.mark.slow
def test_commands_of_the_page(run, bridge, tmp_path: Path, monkeypatch) -> None:
    """With both stores running, and a MaxText step where the page has one."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text("utf-8")
    block = page.split("## Object stores", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    install, *lines = block.splitlines()
    assert install == "pip install 'nnx-pipeline[stores]'"
    with contextlib.ExitStack() as stack:
        for kind, start in SERVERS.items():
            server = stack.enter_context(start())
            for name, value in environment(kind, server.url).items():
                monkeypatch.setenv(name, value)
            fsspec.get_filesystem_class(kind).clear_instance_cache()
            server.reset()
            store = Store(kind, server)
            store.put(checkpoint("unscanned") / "2", "run/100")
        shutil.copy(CONFIG, tmp_path / "mixtral.yml")
        monkeypatch.chdir(tmp_path)
        for line in lines:
            program, *words = shlex.split(line)
            ended = {"nnx-pipeline": run, "linen-compat": bridge}[program](*words)
            assert ended.code == 0, (line, ended.err)


# ---- what is not whole ---------------------------------------------------------------------------


def write(folder: Path, number: int) -> None:
    arrays = NewArrays(folder)
    arrays.create("params/x", (3,), np.dtype(np.int32))
    arrays.write("params/x", (), np.full(3, number, np.int32))
    arrays.finish()


def interrupted_in(folder: Path, copies: dict[StorePath, bytes]) -> None:
    write(folder, 1)
    copies |= {path: path.read_bytes() for path in folder.below()}
    raise KeyboardInterrupt


def begun(store: Store, name: str) -> StorePath:
    """What a process leaves that is killed while it writes an Orbax checkpoint."""
    folder = store.path(name)
    copies: dict[StorePath, bytes] = {}
    with pytest.raises(KeyboardInterrupt), new_folder(folder, Room(1, by_tensorstore=True)) as made:
        interrupted_in(made, copies)
    assert store.names(name) == []  # as an error leaves it
    for path, content in copies.items():
        path.write_bytes(content)
    return folder


def test_what_a_killed_process_left_is_refused_and_written_anew(
    store: Store, bridge, tmp_path: Path
) -> None:
    left = begun(store, "out")
    for words in (("inspect", left), ("check", left, "--config", CONFIG)):
        ended = bridge(*words)
        assert (ended.code, f"{left} is not finished" in ended.err) == (1, True), ended.err
    with pytest.raises(Mismatch, match="is not finished"):
        linen_compat.load(left, config_of())
    assert bridge("convert", SOURCE, left, "--to", "maxtext:scanned").code == 0
    assert_same_leaves(store.read("out", tmp_path), state_in("scanned"))
    ended = bridge("convert", SOURCE, left, "--to", "maxtext:scanned")
    assert (ended.code, f"{left} exists already" in ended.err) == (2, True)


def test_a_step_that_a_killed_training_left_is_passed_over(store: Store) -> None:
    offered, run = offers.checkpoints(), store.path("run")
    linen_compat.save(linen_compat.load(SOURCE, config_of()), run / "1" / "items", step=1)
    (run / "1" / "commit_success.txt").write_bytes(b"")
    (run / "training.yml").write_text("")
    begun(store, "run/2")
    assert find_items(run) == run / "1" / "items"
    with offered.claimed(run):
        assert not (run / "2").exists()
    assert sorted(path.name for path in run.iterdir()) == ["1", "training.yml"]


def test_steps_that_are_removed(store: Store) -> None:
    """Also by a process that is killed after the first object is gone."""
    run = store.path("run")
    linen_compat.save(linen_compat.load(SOURCE, config_of()), run / "4" / "items", step=4)
    for step in (4, 5, 6):
        (run / str(step) / "commit_success.txt").write_bytes(b"")
        (run / str(step) / "items" / "commit_success.txt").write_bytes(b"")
    offers.checkpoints().keep_steps(run, 6, 1, 5)
    assert sorted(path.name for path in run.iterdir()) == ["5", "6"]


def test_a_step_without_its_marker_is_named(store: Store, bridge, tmp_path: Path) -> None:
    """A copy that was not finished looks like one of a run of a file system."""
    shutil.copytree(checkpoint("unscanned"), tmp_path / "run")
    for marker in (tmp_path / "run" / "2").rglob("commit_success.txt"):
        marker.unlink()
    run = store.put(tmp_path / "run", "run")
    reason = "has no commit_success.txt, which is written last: it was not finished"
    for words in (("inspect", run), ("convert", run, tmp_path / "out", "--to", "nnx")):
        ended = bridge(*words)
        assert ended.code == 1
        assert f"{run}/2, the latest step, {reason}; give another step by its name" in ended.err
        assert f"such as {run}/1, or where it is a copy known to be whole, put" in ended.err
    for folder in (run / "2", run / "2" / "items"):
        ended = bridge("inspect", folder)
        assert (ended.code, f"{folder} {reason}; where it is a copy" in ended.err) == (1, True)
    assert bridge("inspect", run / "1").code == 0
    (run / "2" / "commit_success.txt").write_bytes(b"")  # as the message says
    for folder in (run, run / "2", run / "2" / "items"):
        assert bridge("inspect", folder).code == 0


def test_who_comes_later_has_the_folder_alone(store: Store, tmp_path: Path) -> None:
    """And the earlier one ends at its next write, and leaves the other's files as they are."""
    folder, room = store.path("out"), Room(1, by_tensorstore=True)

    def other() -> None:
        ours = stores._claims[folder]  # which another process does not know
        with new_folder(folder, room) as made:
            write(made, 2)
        stores._claims[folder] = ours

    def first_of_two(made: Path) -> None:
        other()
        write(made, 1)

    taken = pytest.raises(Mismatch, match="was taken by another process")
    with taken, new_folder(folder, room) as made:
        first_of_two(made)
    assert store.names("out") == ["_METADATA", "commit_success.txt", "manifest.ocdbt"]
    assert store.read("out", tmp_path)["params/x"].tolist() == [2, 2, 2]


def test_the_later_training_has_the_run(store: Store, monkeypatch) -> None:
    offered, run = offers.checkpoints(), store.path("run")
    with offered.claimed(run):
        monkeypatch.setattr(stores, "_claims", dict(stores._claims))
        ours = stores._claims[run]
        with offered.claimed(run):  # as another process does
            stores._claims[run] = ours
            with pytest.raises(Mismatch, match="was taken by another process"):
                offered.save_step(None, run, small_config(), None)
    assert store.names("run") == []


def write_part(folder: Path, number: int) -> None:
    arrays = NewArrays(folder, part=Part(number, 2, "mark"))
    arrays.create("params/x", (4, 1024), np.dtype(np.int32), shard=(2, 1024))
    own = slice(2 * number, 2 * number + 2)
    arrays.write("params/x", (), np.full((2, 1024), number, np.int32), (own, slice(1024)))
    arrays.complete()
    arrays.finish()


def test_two_processes_write_to_one_folder(store: Store, tmp_path: Path) -> None:
    """Each its own part, of which none may be lost."""
    with new_folder(store.path("out"), Room(1, by_tensorstore=True)) as made:
        assert all(Part(number, 2, "mark").can_begin(made) for number in range(2))
        with ThreadPoolExecutor(2) as processes:
            assert [*processes.map(functools.partial(write_part, made), range(2))] == [None, None]
    assert store.read("out", tmp_path)["params/x"][:, 0].tolist() == [0, 0, 1, 1]
    parts = [f"ocdbt.process_{number}/manifest.ocdbt" for number in range(2)]
    names = ["_METADATA", "commit_success.txt", "manifest.ocdbt", *parts]
    assert store.names("out") == names
    check_index(store.path("out"))
    for file in store.path("out/ocdbt.process_1/d").iterdir():
        file.unlink()
    with pytest.raises(Mismatch, match=r"of ocdbt\.process_1/d, which process 1 of 2 wrote"):
        check_index(store.path("out"))


@pytest.mark.parametrize("to", ["nnx", "huggingface"])
def test_a_conversion_that_fails_leaves_nothing(store: Store, bridge, monkeypatch, to: str) -> None:
    monkeypatch.setattr("linen_compat.formats.huggingface._folder.DTYPES", {})
    broken = store.put(LLAMA, "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    ended = bridge("convert", broken.parent, store.path("out"), "--to", to)
    assert (ended.code, len(ended.err.splitlines())) == (1, 1)
    assert "damaged or is not a safetensors file: it has" in ended.err
    assert store.names("out") == []


@pytest.mark.slow(but=1)
def test_an_object_that_changes_while_it_is_read(store: Store, bridge, monkeypatch) -> None:
    import linen_compat.checkpoints._convert as converting

    copy = converting.copy
    for folder, name in (("orbax", "_METADATA"), ("llama", "model.safetensors")):
        for to in ("nnx", "huggingface"):
            there = store.put(SOURCE if folder == "orbax" else LLAMA, folder)

            def changing(*arguments, file=there / name, **options):
                copy(*arguments, **options)
                file.write_bytes(file.read_bytes() + b" ")

            monkeypatch.setattr(converting, "copy", changing)
            words = ("--config", CONFIG) if folder == "orbax" else ()
            ended = bridge("convert", there, store.path("out"), "--to", to, *words)
            said = f"{there / name} changed while it was read; read it again when nothing writes"
            assert (ended.code, said in ended.err) == (1, True), ended.err
            assert store.names("out") == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("to", ["nnx", "huggingface"])
def test_every_moment_of_a_kill(store: Store, bridge, to: str) -> None:
    """A process that is killed leaves what its first requests did: all of these are tried.

    From one request that changes the store on all are denied, and so is what tidies up.
    """
    from kill_stores import content

    words = ("convert", LLAMA, store.path("out"), "--to", to)
    changes: list[str] = []

    def counting(method: str, path: str) -> None:
        changes.extend([path] if method in ("POST", "PUT", "DELETE") else [])

    store.server.faults.answer = counting
    assert bridge(*words).code == 0
    whole, names = content(store.path("out")), store.names("out")
    for most in range(len(changes)):
        store.server.reset()
        done: list[str] = []

        def dying(method: str, path: str, most: int = most, done: list[str] = done) -> int | None:
            done.extend([path] if method in ("POST", "PUT", "DELETE") else [])
            return 403 if len(done) > most else None

        store.server.faults.answer = dying
        ended = bridge(*words)
        store.server.faults.answer = lambda method, path: None
        if len(done) <= most:  # how many requests TensorStore makes of its writes is not fixed
            assert (ended.code, content(store.path("out"))) == (0, whole)
            continue
        assert ended.code in (1, 2)
        assert content(store.path("out")) is None, changes[:most]
        assert bridge(*words).code == 0, changes[:most]
        assert (content(store.path("out")), store.names("out")) == (whole, names)


@pytest.mark.slow
def test_processes_that_are_killed(store: Store, tmp_path: Path, monkeypatch) -> None:
    """`benchmarks/kill_stores.py` with a few kills: it checks what they leave."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    source = kill_stores.make_source(tmp_path)
    found = kill_stores.kill(store.scheme, source, kills=len(kill_stores.TASKS), seed=1)
    assert found.total() == len(kill_stores.TASKS)


# ---- what cannot be reached ----------------------------------------------------------------------


def test_a_missing_bucket_and_a_missing_folder(store: Store, bridge, run, tmp_path: Path) -> None:
    none = f"{store.scheme}://none/run"
    commands = [
        (bridge, ("inspect", none)),
        (bridge, ("check", none, "--config", CONFIG)),
        (bridge, ("convert", none, tmp_path / "out", "--to", "nnx")),
        (bridge, ("convert", SOURCE, none, "--to", "nnx")),
        (bridge, ("convert", LLAMA, none, "--to", "huggingface")),
        (run, ("generate", "--checkpoint", none, "--tokens", "1", "--model", "tiny")),
        (run, ("train", "--model", "tiny", "--steps", "1", "--checkpoint-dir", none)),
    ]
    for command, words in commands:
        ended = command(*words)
        said = f"there is no bucket {store.scheme}://none; make it, or give the name of another one"
        assert (ended.code, said in ended.err) == (2, True), (words, ended.err)
        assert len(ended.err.splitlines()) == 1
    ended = bridge("inspect", store.path("none"))
    assert (ended.code, f"{store.path('none')} does not exist; give" in ended.err) == (2, True)
    assert os.listdir(tmp_path) == []


def test_a_bucket_that_is_denied(store: Store, bridge) -> None:
    there = store.put(LLAMA, "llama")
    store.server.faults.answer = lambda method, path: 403
    fsspec.get_filesystem_class(store.scheme).clear_instance_cache()
    for words in (("inspect", there), ("convert", SOURCE, store.path("o"), "--to", "nnx")):
        ended = bridge(*words)
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
        assert "may not be read or written by this account" in ended.err


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [(403, 1, "may not be read by this user"), (503, 1, "cannot be reached")],
)
def test_arrays_that_do_not_come(store: Store, bridge, few_tries, status, code, said) -> None:
    """TensorStore asks for them itself."""
    there = store.put(SOURCE, "there")
    store.server.faults.answer = lambda method, path: status if "/d/" in path else None
    for words in (("inspect", there), ("check", there, "--config", CONFIG, "--read")):
        ended = bridge(*words)
        assert (ended.code, len(ended.err.splitlines())) == (code, 1)
        assert said in ended.err, ended.err


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore asks twice, and gcsfs does not wait before it asks again."""
    for driver in ("gcs", "s3"):
        monkeypatch.setitem(paths._OF_STORES, f"{driver}_request_retries", {"max_retries": 1})
    monkeypatch.setattr(gcsfs.retry, "random", SimpleNamespace(random=lambda: -99.0))


def test_a_connection_that_is_lost(store: Store, bridge, monkeypatch, few_tries) -> None:
    there = store.put(SOURCE, "there")
    for name, value in environment(store.scheme, "http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match="cannot be reached"):
        NewArrays(there).create("x", (1,), np.dtype(np.int32))
    fsspec.get_filesystem_class(store.scheme).clear_instance_cache()
    for words in (("inspect", there), ("convert", SOURCE, store.path("o"), "--to", "nnx")):
        ended = bridge(*words)
        assert (ended.code, len(ended.err.splitlines())) == (1, 1), ended.err
        assert "cannot be reached" in ended.err
        assert "see whether the network and the endpoint of the store are there" in ended.err


def test_a_connection_that_is_lost_while_it_writes(store: Store, bridge, few_tries) -> None:
    for to in ("nnx", "huggingface"):
        asked = iter(range(1000))
        store.server.faults.answer = lambda method, path, asked=asked: (
            503 if method in ("POST", "PUT") and next(asked) >= 2 else None
        )
        ended = bridge("convert", LLAMA, store.path(to), "--to", to)
        assert (ended.code, "cannot be reached" in ended.err) == (1, True), ended.err
        assert store.names(to) == []


def test_without_the_extra_it_is_named(bridge, monkeypatch) -> None:
    for scheme, package in (("gs", "gcsfs"), ("s3", "s3fs")):
        monkeypatch.setitem(sys.modules, package, None)
        ended = bridge("inspect", f"{scheme}://bucket/x")
        said = f"{scheme}://bucket/x needs {package}"
        assert (ended.code, said in ended.err) == (2, True), ended.err
        assert "pip install 'nnx-pipeline[stores]'" in ended.err


@pytest.mark.parametrize("name", ["gs://", "s3:///x", "gs://b//x", "s3://b/../x", "gs://b/./x"])
def test_names_that_no_object_has(bridge, name: str) -> None:
    ended = bridge("inspect", name)
    assert (ended.code, f"{name} names no folder of a store" in ended.err) == (2, True)


def test_a_name_that_begins_another_one(store: Store) -> None:
    """What is in `10` is not in `1`, also where `1` is emptied."""
    (store.path("10/x")).write_bytes(b"x")
    (store.path("1.incomplete")).write_bytes(b"x")
    with new_folder(store.path("1"), Room(1, by_tensorstore=True)) as folder:
        write(folder, 1)
    stores.remove(store.path("1"))
    names = ["1.incomplete", "10/x"]
    assert [str(path) for path in store.path().below()] == [str(store.path(n)) for n in names]
    assert store.path().parent == store.path("1").parent == store.path()


def test_a_whole_bucket_is_no_new_folder(store: Store, bridge) -> None:
    ended = bridge("convert", SOURCE, f"{store.scheme}://{BUCKET}", "--to", "nnx")
    assert (ended.code, "is a whole bucket; give the name of a new folder" in ended.err) == (
        2,
        True,
    )


def test_room_is_looked_at_where_a_folder_is_made_first(store: Store, bridge, monkeypatch) -> None:
    full = SimpleNamespace(f_blocks=9, f_bavail=1, f_bfree=1, f_frsize=4)
    monkeypatch.setattr(folders.os, "statvfs", lambda path: full)
    ended = bridge("convert", LLAMA, store.path("out"), "--to", "huggingface")
    assert (ended.code, "(TMPDIR) first, takes" in ended.err) == (2, True)
    assert bridge("convert", LLAMA, store.path("out"), "--to", "nnx").code == 0


# ---- files of this machine -----------------------------------------------------------------------


def test_addresses_of_files(bridge, tmp_path: Path) -> None:
    """As the standard of such addresses says: `%20` is a space."""
    out = tmp_path / "a b#c"
    address = f"file://{tmp_path}/a%20b%23c"
    assert bridge("convert", f"file://localhost{SOURCE}", address, "--to", "nnx").code == 0
    assert os.listdir(tmp_path) == ["a b#c"]
    assert bridge("inspect", address).out == bridge("inspect", out).out
    model = linen_compat.load(f"file://{LLAMA}")
    linen_compat.save(model, f"file://{tmp_path}/saved", "huggingface")
    assert linen_compat.load(tmp_path / "saved").config == model.config
    for wrong in (f"file://host{out}", f"{address}?x", f"{address}#x", "file://", "file:///a%00"):
        with pytest.raises(InputError, match="is not a file of this machine"):
            linen_compat.load(wrong)
