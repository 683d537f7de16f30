"""Kills `linen-compat convert` and `linen_compat.save` while they write to object stores.

    python benchmarks/kill_stores.py [--kills 50] [--seed 0]

A process that writes a checkpoint to a server of the protocol on 127.0.0.1 is killed by SIGKILL, at
a random moment after its first object is there. What it leaves must be refused, or be whole and
equal to the bit to a checkpoint that nobody interrupted. The same command is run again, to be
killed too or to its end: then it must have made the checkpoint, equal to the bit, with nothing else
beside it. A page of results is written.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from object_stores import BUCKET, SERVERS, environment

from nnx_pipeline.lab._files import place, write_text

RESULTS = Path(__file__).parent / "results" / "kill_stores.md"
LONGEST = 300.0  # seconds until a process must have ended, on a machine that is busy
# Of the model that is written, 10 MB.
SIZES = {"vocab_size": 8192, "embed_dim": 128, "num_layers": 2}
METHOD = multiprocessing.get_context("forkserver")
METHOD.set_forkserver_preload(["linen_compat._cli.running", "linen_compat.checkpoints.saving"])


def write(task: str, source: Path, target: str, environment: dict[str, str]) -> None:
    """Runs one of the tasks in this process: `convert` to a format, or `save` in one."""
    command, _, kind = task.partition(" ")
    os.environ |= {**environment, "JAX_PLATFORMS": "cpu"}
    with open(os.devnull, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if command == "save":
        import linen_compat

        linen_compat.save(linen_compat.load(source), target, kind)
        return
    from linen_compat._cli import main as cli

    sys.argv = ["linen-compat", "convert", str(source), target, "--to", kind]
    cli.main()


TASKS = ("convert nnx", "convert huggingface", "save maxtext:scanned", "save huggingface")


def make_source(folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    import dataclasses

    import jax
    from flax import nnx

    import linen_compat
    from nnx_pipeline import Mixtral, preset

    config = preset("tiny")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **SIZES))
    model = jax.jit(lambda: Mixtral(config, rngs=nnx.Rngs(0)))()
    linen_compat.save(model, folder / "source", "huggingface")
    return folder / "source"


def content(folder: Path) -> dict[str, bytes] | None:
    """Every array, or the bytes of every object, of a checkpoint; None where it is refused."""
    from linen_compat.formats._orbax.arrays import StoredArrays, array_specs
    from linen_compat.formats._orbax.inspect import find_items
    from linen_compat.formats._streams import Mismatch
    from linen_compat.formats.huggingface._folder import TensorFolder
    from linen_compat.formats.huggingface._stream import is_huggingface
    from nnx_pipeline import InputError

    try:
        if is_huggingface(folder):
            tensors = TensorFolder(folder)
            return {name: tensors.read(name, ()).tobytes() for name in tensors.specs}
        items = find_items(folder)
    except (InputError, Mismatch) as error:
        if "not finished" in str(error) or "does not exist" in str(error):
            return None
        raise
    stored = StoredArrays(items)
    return {leaf: stored.read(leaf).tobytes() for leaf in array_specs(items)}


def first_object(folder: Path, process: Any) -> float:
    """Waits for the first object of a folder, and says when it was there."""
    while process.is_alive() and not any(folder.iterdir()):
        time.sleep(0.05)
    return time.monotonic()


def run(task: str, source: Path, folder: Path, after: float | None) -> float:
    """Seconds from the first object to the end of a task, which a kill may bring `after` so many.

    Raises RuntimeError where the task fails.
    """
    # The server of forks has the environment of its own start.
    given = (task, source, str(folder), {**os.environ})
    process = METHOD.Process(target=write, args=given)
    process.start()
    began = first_object(folder, process)
    process.join(LONGEST if after is None else after)
    process.kill()
    process.join()
    if process.exitcode not in (0, -9) or (after is None and process.exitcode):
        raise RuntimeError(f"{task} to {folder}: exit code {process.exitcode}")
    return time.monotonic() - began


def kill(scheme: str, source: Path, kills: int, seed: int) -> Counter[str]:
    """Kills so many processes in one store, task by task; what they left, by the task."""
    draw, found = random.Random(seed), Counter[str]()
    root = place(f"{scheme}://{BUCKET}")
    whole, seconds = {}, {}
    for task in TASKS:
        folder = root / f"whole {task}"
        seconds[task] = run(task, source, folder, None)
        print(f"{scheme}: {task} takes {seconds[task]:.1f} s", file=sys.stderr, flush=True)
        whole[task] = content(folder)
    task, folder = TASKS[0], root / "0"
    for number in range(kills):
        run(task, source, folder, draw.uniform(0.0, seconds[task]))
        left = content(folder)
        assert left in (None, whole[task]), f"{task}: half a checkpoint was taken for whole"
        is_left = left is None and any(folder.iterdir())
        found[f"{task}: {'unfinished' if is_left else 'whole' if left else 'nothing'}"] += 1
        print(f"{scheme}: {number + 1} kills, {task}", file=sys.stderr, flush=True)
        if left is None and draw.random() < 0.4 and number + 1 < kills:
            continue  # what is left is written anew by a process that is killed too
        if left is None:
            run(task, source, folder, None)
            assert content(folder) == whole[task], f"{task}: the last run made something else"
        names = [path.name for path in folder.below()]
        assert not any(name.startswith(".") for name in names), f"{task}: {names}"
        task, folder = TASKS[(TASKS.index(task) + 1) % len(TASKS)], root / f"{number + 1}"
    return found


def page(found: dict[str, Counter[str]], kills: int, seed: int) -> str:
    """The page of results."""
    versions = ", ".join(version(name) for name in ("jax", "tensorstore", "gcsfs", "s3fs"))
    outcomes = ("unfinished", "whole", "nothing")
    rows = "\n".join(
        f"| `{scheme}://` | {task} | "
        + " | ".join(str(counts[f"{task}: {outcome}"]) for outcome in outcomes)
        + " |"
        for scheme, counts in found.items()
        for task in TASKS
    )
    return f"""# Checkpoints killed while they are written to object stores

Processes that write a checkpoint of 10 MB were killed by SIGKILL at random moments after their
first object was there: `linen-compat convert` to a format, and `linen_compat.save` in one. The
stores are servers on 127.0.0.1: moto's for `s3://`, and that of `tests/object_stores.py` for
`gs://`. Made by `python benchmarks/kill_stores.py --kills {kills} --seed {seed}`; jax,
tensorstore, gcsfs and s3fs {versions}.

| store | what was killed | left unfinished | was whole | left nothing |
|---|---|--:|--:|--:|
{rows}

What was unfinished was refused each time, and never read. What was whole is to the bit a checkpoint
that nobody interrupted. Where there was none, the same command was run again, to be killed as well
or to its end. It then made that checkpoint, to the bit, and left no other object.

What this does not show: the real stores, and several processes that write to one folder.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="in each store")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.disable(logging.WARNING)
    found: dict[str, Counter[str]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["TMPDIR"] = str(folder)  # where killed processes leave files too
        servers = {name: stack.enter_context(start()) for name, start in SERVERS.items()}
        for scheme, server in servers.items():
            os.environ |= environment(scheme, server.url)
        for server in servers.values():
            server.reset()
        source = make_source(folder)
        for scheme in servers:
            found[scheme] = kill(scheme, source, options.kills, options.seed)
    write_text(str(RESULTS), page(found, options.kills, options.seed))


if __name__ == "__main__":
    main()
