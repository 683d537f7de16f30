"""Kills a training that saves checkpoints at random moments, and resumes it each time.

    python benchmarks/kill_train.py [--kills 100]

writes benchmarks/results/kill_train.md. Each training is a process that gets SIGKILL, which no
handler sees. Half of the moments are drawn over the whole time of a process, which is mostly that
of starting, tracing and compiling; for the other half a step is drawn, and a moment from its end
on. Each process has `LONGEST` seconds.

After every kill the newest step must be no more than `--save-every` steps behind the last one that
was done, and Orbax's own manager must find the same newest step. When a training has come to its
end, every step that it saved and every loss that it had must be, to the bit, those of a training
that nobody killed.
"""

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from nnx_pipeline.lab._files import write_text

RESULTS = Path(__file__).parent / "results" / "kill_train.md"
logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without
LONGEST = 300.0  # seconds until a process must have ended, on a machine that is busy
FOREVER = float("inf")  # minutes
MODEL = (
    *("--model", "tiny", "--set", "model.num_layers=2", "--set", "model.vocab_size=64"),
    *("--set", "train.sequence_length=16", "--set", "model.dropout_rate=0.1"),
    *("--mesh", "stage=2"),
)
# Imported once; each process is a fork of the one that has them, before JAX has started.
PRELOADED = ["nnx_pipeline.train._cli.training", "linen_compat.checkpoints._offered"]
METHOD = multiprocessing.get_context("forkserver")
METHOD.set_forkserver_preload(PRELOADED)


def train(arguments: list[str], steps: Connection, folder: Path) -> None:
    """Runs the command in this process, and tells of each step before it may be saved.

    - `arguments`: of `nnx-pipeline train`.
    - `steps`: is sent the number of each step and its loss.
    - `folder`: of the run; beside it are what the command prints, and compiled programs.
    """
    import jax

    from nnx_pipeline.lab._cli import main as cli
    from nnx_pipeline.train._cli import training as command

    jax.config.update("jax_platforms", "cpu")
    # Filled by the first two trainings, which nobody kills; else most kills would meet a compile.
    jax.config.update("jax_compilation_cache_dir", str(folder.with_name("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    real = command.train

    def told(*given: Any, **options: Any) -> Any:
        for step in real(*given, **options):
            steps.send((int(step.state.step), float(step.metrics.loss).hex()))
            yield step

    command.train = told  # type: ignore[assignment]
    with open(folder.with_suffix(".txt"), "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["nnx-pipeline", "train", *arguments]
    cli.main()


@dataclass
class Tally:
    """What was counted.

    - `kills`: by the moment at which they came.
    - `resumes`: processes that began with `--resume`.
    - `runs`: trainings that came to their end.
    - `steps`, `losses`: saved steps and losses that were compared.
    - `most_lost`: the most steps done after the newest saved one.
    """

    kills: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    runs: int = 0
    steps: int = 0
    losses: int = 0
    most_lost: int = 0

    @property
    def killed(self) -> int:
        """All kills."""
        return self.kills.total()


@dataclass(frozen=True)
class Task:
    """One training, in a folder of its own.

    - `folder`: of the run.
    - `steps`: the number of the last step.
    - `every`: steps from one save to the next.
    """

    folder: Path
    steps: int
    every: int

    def start(self, pipe: Connection) -> Any:
        """A process that trains, or goes on where the folder has a saved step."""
        arguments = [*MODEL, "--steps", str(self.steps), "--save-every", str(self.every)]
        arguments += ["--checkpoint-dir", str(self.folder)]
        arguments += ["--resume"] if self.newest() else []
        process = METHOD.Process(target=train, args=(arguments, pipe, self.folder))
        process.start()
        return process

    def newest(self) -> int:
        """The newest step in the folder, by the names in it; 0 where none is saved."""
        if not self.folder.exists():
            return 0
        steps = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]
        return max(steps, default=0)  # a folder is taken before it has a step

    def unfinished(self) -> set[Path]:
        """Folders that are not complete."""
        beside = self.folder.parent.glob(f"{self.folder.name}.*.incomplete")
        return {*beside, *self.folder.glob("*.incomplete")}

    def saved(self) -> dict[int, dict[str, np.ndarray]]:
        """Every array of every saved step, read by Orbax."""
        import jax
        import orbax.checkpoint as ocp

        found = {}
        with ocp.PyTreeCheckpointer() as checkpointer:
            for path in self.folder.iterdir():
                if path.name.isdecimal():
                    tree = checkpointer.restore(path / "items")
                    leaves = jax.tree_util.tree_leaves_with_path(tree)
                    found[int(path.name)] = {
                        jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves
                    }
        return found


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    - `losses`: of the steps that it told of, by their numbers.
    - `killed`: whether it was killed; if not, it came to its end.
    - `in_save`: whether it left a folder that was not complete.
    - `times`: seconds from its start to each step.
    """

    losses: dict[int, str]
    killed: bool
    in_save: bool
    times: list[float]

    @property
    def moment(self) -> str:
        """When it was killed, in words."""
        if self.in_save:
            return "while a step was being saved"
        return "after its first step, at another moment" if self.losses else "before its first step"


def watch(task: Task, after: tuple[int, float] | None) -> Ended:
    """Starts a process and waits for its end, which a kill may bring.

    - `after`: kills it so many seconds after it has done so many steps; None lets it live.

    Raises RuntimeError where it fails, or is not done after `LONGEST` seconds.
    """
    before = task.unfinished()
    here, there = METHOD.Pipe(duplex=False)
    began = time.monotonic()
    process = task.start(there)
    there.close()
    losses, times = _losses(here, began, after, process)
    said = task.folder.with_suffix(".txt")
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"{task.folder}: exit code {process.exitcode}: {said.read_text()}")
    left = task.unfinished() - before
    return Ended(losses, process.exitcode == -9, bool(left), times)


def _losses(
    pipe: Connection, began: float, after: tuple[int, float] | None, process: Any
) -> tuple[dict[int, str], list[float]]:
    """The losses that a process tells of until it ends or is killed, and when it did."""
    losses: dict[int, str] = {}
    times: list[float] = []
    kill_at = began + after[1] if after and after[0] == 0 else float("inf")
    with contextlib.suppress(EOFError):  # the process has ended
        while True:
            if not pipe.poll(max(0.0, min(kill_at, began + LONGEST) - time.monotonic())):
                process.kill()
                break
            number, losses[number] = pipe.recv()
            times.append(time.monotonic() - began)
            if after and after[0] == len(losses):
                kill_at = times[-1] + began + after[1]
        while pipe.poll(1.0):  # steps that it told of before it was killed
            number, losses[number] = pipe.recv()
    process.join(LONGEST)
    if time.monotonic() - began >= LONGEST:
        raise RuntimeError(f"a process was not done after {LONGEST:.0f} s")
    return losses, times


@dataclass(frozen=True)
class Whole:
    """A training that nobody killed.

    - `losses`: of all its steps.
    - `saved`: the arrays of its saved steps.
    - `seconds`: from the start of a process to its last step.
    - `gap`: seconds from one step to the next, with what is saved between.
    """

    losses: dict[int, str]
    saved: dict[int, dict[str, np.ndarray]]
    seconds: float
    gap: float

    def compare(self, task: Task, losses: dict[int, str]) -> tuple[int, int]:
        """How many steps and losses of another training are the same to the bit.

        Raises AssertionError where one is not, and where one is missing.
        """
        assert losses == self.losses, f"{task.folder}: losses {losses}, not {self.losses}"
        saved = task.saved()
        assert saved.keys() == self.saved.keys(), f"{task.folder} has the steps {sorted(saved)}"
        for step, leaves in saved.items():
            assert leaves.keys() == self.saved[step].keys(), f"{task.folder}: names differ"
            for name, leaf in leaves.items():
                want = self.saved[step][name]
                same = (leaf.dtype, leaf.tobytes()) == (want.dtype, want.tobytes())
                assert same, f"{task.folder}: {name} differs at step {step}"
        return len(saved), len(losses)


def whole_run(folder: Path, steps: int, every: int) -> Whole:
    """Trains without a kill, and again from the first saved step on, to know what that takes."""
    task = Task(folder / "whole", steps, every)
    ended = watch(task, None)
    saved = task.saved()
    again = Task(folder / "again", steps, every)
    shutil.copytree(task.folder, again.folder)
    for step in set(saved) - {min(saved)}:
        shutil.rmtree(again.folder / str(step))
    resumed = watch(again, None)
    gap = (resumed.times[-1] - resumed.times[0]) / max(1, len(resumed.times) - 1)
    whole = Whole(ended.losses, saved, resumed.times[-1], gap)
    before = {step: ended.losses[step] for step in range(1, min(saved) + 1)}
    whole.compare(again, {**before, **resumed.losses})
    return whole


def newest_by_orbax(folder: Path) -> int | None:
    """The newest step of a run as Orbax's own manager of steps finds it."""
    import orbax.checkpoint as ocp

    handlers = {"items": ocp.PyTreeCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        return manager.latest_step()


def kill_again_and_again(
    folder: Path,
    *,
    kills: int,
    steps: int = 12,
    every: int = 2,
    seed: int = 0,
    minutes: float = FOREVER,
) -> Tally:
    """Kills trainings and resumes them, one after the other; see above for what must hold.

    - `folder`: for the runs.
    - `kills`: how many.
    - `steps`, `every`: as `--steps` and `--save-every` of each training.
    - `seed`: of the moments.
    - `minutes`: after which the last training is let live, though there were fewer kills.

    Raises AssertionError where something does not hold.
    """
    whole = whole_run(folder, steps, every)
    draw, tally, began = random.Random(seed), Tally(), time.monotonic()
    for number in itertools.count():
        task = Task(folder / f"run{number}", steps, every)
        losses: dict[int, str] = {}
        while True:
            is_last = tally.killed >= kills or time.monotonic() - began > 60 * minutes
            before = task.newest()
            tally.resumes += before > 0
            ended = watch(task, None if is_last else _moment(draw, whole, steps - before))
            _check(task, whole, ended, before, tally)
            losses |= ended.losses
            if not ended.killed:
                break
            tally.kills[ended.moment] += 1
        compared = whole.compare(task, losses)
        tally.runs, tally.steps = tally.runs + 1, tally.steps + compared[0]
        tally.losses += compared[1]
        shutil.rmtree(task.folder)
        if is_last:
            return tally
        print(f"{tally.killed} kills, {tally.runs} trainings", file=sys.stderr, flush=True)


def _moment(draw: random.Random, whole: Whole, left: int) -> tuple[int, float]:
    """When to kill a process that has so many steps left, as `watch` takes it."""
    if left == 0 or draw.random() < 0.5:
        return 0, draw.uniform(0.0, whole.seconds)
    return draw.randint(1, left), draw.uniform(0.0, whole.gap)


def _check(task: Task, whole: Whole, ended: Ended, before: int, tally: Tally) -> None:
    """What must hold after each kill."""
    newest = task.newest()
    done = max(ended.losses, default=before)
    wrong = {n: loss for n, loss in ended.losses.items() if loss != whole.losses[n]}
    assert not wrong, f"{task.folder}: losses {wrong} are not {whole.losses}"
    assert min(ended.losses, default=before + 1) == before + 1, "it went on elsewhere"
    assert newest >= before, f"{task.folder}: step {before} was there before step {newest}"
    assert done - newest <= task.every, f"{task.folder}: {newest} is the newest step after {done}"
    if newest:
        assert newest_by_orbax(task.folder) == newest, f"{task.folder}: Orbax finds another step"
    tally.most_lost = max(tally.most_lost, done - newest)


def page(tally: Tally, options: argparse.Namespace) -> str:
    """The page of results."""
    versions = ", ".join(version(name) for name in ("jax", "flax", "orbax-checkpoint"))
    rows = "\n".join(f"| {moment} | {count} |" for moment, count in sorted(tally.kills.items()))
    limit = f" --minutes {options.minutes:g}" if options.minutes < FOREVER else ""
    return f"""# Trainings killed while they save checkpoints

```sh
nnx-pipeline train {" ".join(MODEL[:6])} \\
  {" ".join(MODEL[6:])} --steps {options.steps} --save-every {options.every}
```

This command was killed by SIGKILL at random moments and resumed each time, on virtual CPU devices.
Made by `python benchmarks/kill_train.py --kills {options.kills}{limit}`, which had time for
{tally.killed} kills; jax, flax and orbax-checkpoint {versions}.

| a process was killed | kills |
|---|--:|
{rows}
| together | {tally.killed} |

{tally.resumes} processes began with `--resume`, and {tally.runs} trainings came to their end. All
{tally.losses} losses and every array of the {tally.steps} saved steps, parameters and moments,
are to the bit those of a training that nobody killed. At most {tally.most_lost} steps were lost by
a kill, with {options.every} steps from one save to the next. After no kill was an unfinished step
the newest one, for `--resume` or for Orbax's own manager.

What this does not show: a machine that loses its power, a disk that is full, a file system over a
network, and several processes that train together.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=FOREVER, help="end after so many minutes")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_again_and_again(
            Path(folder),
            kills=options.kills,
            steps=options.steps,
            every=options.every,
            seed=options.seed,
            minutes=options.minutes,
        )
    write_text(str(RESULTS), page(tally, options))


if __name__ == "__main__":
    main()
