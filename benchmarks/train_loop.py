"""What the loop of `nnx-pipeline train` adds to its steps, and whether it grows.

    python benchmarks/train_loop.py overhead [WORD]  the loop beside bare steps
    python benchmarks/train_loop.py saves [WORD]     the same with steps saved in the background
    python benchmarks/train_loop.py growth     10,000 steps with saves, metrics and a text
    python benchmarks/train_loop.py            writes benchmarks/results/train_loop.md

The first three keep what they find in train_loop.json. Bare steps are the same compiled step,
called again and again with one batch, and awaited at their end alone. They and the command's take
turns in one process, so that a machine which is slow for a while is slow for both. With a word the
cases that have it in their name are measured, and the others kept.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kept_rows import write_rows

from nnx_pipeline.lab._files import write_text

RESULTS = Path(__file__).parent / "results" / "train_loop.md"
KNOWN = RESULTS.with_suffix(".json")
Found = dict[str, Any]
SMALL = ("--set", "train.sequence_length=32", "--set", "train.global_batch=8")
CASES = {
    "`tiny`, one device": ("--model", "tiny"),
    "`tiny`, `stage=4,fsdp=2`": ("--model", "tiny", "--mesh", "stage=4,fsdp=2"),
    "`mixtral-small`, 8 × 32 tokens": ("--model", "mixtral-small", *SMALL),
    "`mixtral-small`, its own batch": ("--model", "mixtral-small"),
}
# Steps in a turn, and turns: many short ones, as the machine is not equally fast for long; longer
# ones with saves, which end within a turn.
TURNS = dict(zip(CASES, ((10, 20), (5, 20), (2, 8), (1, 3)), strict=True))
TURNS_OF_SAVES = dict(zip(CASES, ((40, 10), (20, 10), (16, 2), (2, 2)), strict=True))
# Growth is looked for in a model whose steps take little time.
FAST = (
    *("--model", "tiny", "--set", "model.num_layers=2", "--set", "model.vocab_size=256"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=4"),
)


def command(words: list[str]) -> None:
    """Runs `nnx-pipeline train` in this process."""
    from nnx_pipeline.lab._cli.main import main

    sys.argv = ["nnx-pipeline", "train", *words]
    with (
        contextlib.suppress(SystemExit),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        main()


def in_turns(words: list[str], steps: int, turns: int, every: int | None = None) -> Found:
    """Trains by the command, with bare steps in turns; the seconds of both.

    `every` is `--save-every`: each turn of the command has one save, at its middle.
    """
    import jax

    from nnx_pipeline.train import loop
    from nnx_pipeline.train._cli import training
    from nnx_pipeline.train.data import learnable_batches

    bare, told, host, busy = list[float](), list[float](), [0.0, 0.0], [0.0, 0.0]

    def train(config: Any, mesh: Any, **given: Any) -> Iterator[loop.Step]:
        real = loop.train(config, mesh, **given)
        with jax.set_mesh(mesh):
            state = loop.make_state(config, mesh, seed=1)
            step = loop.jit_train_step(state, mesh)
        batch = next(learnable_batches(config, mesh))
        first = steps // 2 if every else steps  # a save comes in the middle of the next turns
        yield from (next(real) for _ in range(first))
        for turn in range(-1, turns):
            before = _now()
            with jax.set_mesh(mesh):
                for _ in range(steps):
                    state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            between = _now()
            for _ in range(steps):
                result = next(real)
                yield result
            jax.block_until_ready(result.metrics)
            if turn < 0:  # it compiles
                continue
            for number, (a, b) in enumerate(((before, between), (between, _now()))):
                each = [(y - x) / steps for x, y in zip(a, b, strict=True)]
                (bare, told)[number].append(each[0])
                host[number] += each[1] / turns
                busy[number] += each[2] / turns

    training.train = train  # type: ignore[assignment]
    first = steps // 2 if every else steps
    try:
        command([*words, "--steps", str(first + steps * (turns + 1))])
    finally:
        training.train = loop.train
    shares = [b / a - 1 for a, b in zip(bare, told, strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "bare": statistics.median(bare),
        "added": middle,
        "half": [low, high],
        "host": host,
        "processors": busy[1] / busy[0] - 1,
        "turns": turns,
        "steps": steps,
    }


def _now() -> tuple[float, float, float]:
    """Seconds, and those of processors for this thread and for all."""
    return time.monotonic(), time.thread_time(), time.process_time()


def overhead(folder: Path, word: str = "") -> Found:
    """The loop with metrics in files, which do the most of it."""
    found = read().get("overhead", {})
    for number, (name, words) in enumerate(CASES.items()):
        if word not in name:
            continue
        metrics, board = str(folder / f"metrics{number}"), str(folder / f"board{number}")
        files = ["--metrics", metrics, "--tensorboard", board]
        found[name] = in_turns([*words, *files], *TURNS[name])
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def saves(folder: Path, word: str = "") -> Found:
    """The same with a save in each turn, in the background."""
    found = read().get("saves", {})
    for number, (name, words) in enumerate(CASES.items()):
        if word not in name:
            continue
        steps, turns = TURNS_OF_SAVES[name]
        run = folder / f"run{number}"
        kept = ["--checkpoint-dir", str(run), "--keep", "1", "--save-every", str(steps)]
        one = in_turns([*words, *kept, "--save-in-background"], steps, turns, steps)
        files = (path for path in run.rglob("*") if path.is_file())
        found[name] = one | {"bytes": sum(path.stat().st_size for path in files)}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def growth(folder: Path, steps: str = "10000") -> Found:
    """What the process holds after each tenth of the steps."""
    import jax

    from nnx_pipeline.train import loop
    from nnx_pipeline.train._cli import training

    held, count = list[Found](), int(steps)

    def train(*given: Any, **options: Any) -> Iterator[loop.Step]:
        began = time.monotonic()
        for number, step in enumerate(loop.train(*given, **options), 1):
            yield step
            if number % (count // 10) == 1:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                held.append(
                    {
                        "step": number,
                        "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                        "arrays": len(jax.live_arrays()),
                        "threads": threading.active_count(),
                        "files": len(os.listdir("/proc/self/fd")),
                        "seconds": time.monotonic() - began,
                    }
                )

    text = folder / "text.txt"
    text.write_text(" ".join(map(str, range(60_000))))
    words = [*FAST, "--steps", steps, "--data", str(text), "--eval-every", str(count // 20)]
    words += ["--checkpoint-dir", str(folder / "run"), "--save-every", str(count // 100)]
    words += ["--keep", "3", "--save-in-background", "--metrics", str(folder / "metrics")]
    words += ["--tensorboard", str(folder / "board")]
    training.train = train  # type: ignore[assignment]
    command(words)
    return {"held": held, "words": [word for word in words if not word.startswith(str(folder))]}


def read() -> Found:
    return json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}


ABOUT = """# What the loop of a training adds

Made by `python benchmarks/train_loop.py` on virtual CPU devices, with JAX 0.10.2. Bare steps are
the compiled step alone, called with one batch again and again. They and `nnx-pipeline train` take
turns. *Added* is the median of all turns, with the middle half of them, and *processors* the same
in processor time. *Thread* is the processor time of the loop's own thread for a step, with that of
bare steps in brackets. Here two cores make the batches, call the steps and compute them. On
accelerators the host is free while a step runs: what the loop adds is hidden while its thread needs
less than a step takes.

## With metrics on the terminal, in JSON and for TensorBoard
"""
COLUMNS = """
| training | turns × steps | ms a bare step | added | middle half | processors | thread, ms |
|---|--:|--:|--:|--:|--:|--:|
"""
ABOUT_SAVES = """
## With a save in each turn

A saved step has {bytes} MB. The two cores that compute write it too. This table was made on a
faster machine than the one above.
"""
ABOUT_GROWTH = """
## {steps:,} steps

`tiny` with 2 layers on a text, with an evaluation every {evaluates:,} steps, a save in the
background every {saves:,} of which three are kept, and metrics in both files. After each tenth:

| step | MB resident | JAX arrays | threads | open files | ms a step |
|--:|--:|--:|--:|--:|--:|
"""


def rows_of(found: Found) -> str:
    rows = ""
    for name, one in found.items():
        of = f"{one['turns']} × {one['steps']}"
        low, high = one["half"]
        bare, told = (f"{1e3 * seconds:,.1f}" for seconds in one["host"])
        cells = [f"{one['bare'] * 1e3:,.1f}", f"{one['added']:.1%}", f"{low:.1%} to {high:.1%}"]
        cells += [f"{one['processors']:.1%}", f"{told} ({bare})"]
        rows += f"| {' | '.join([name, of, *cells])} |\n"
    return rows


def page() -> str:
    found = read()
    text = ABOUT + COLUMNS + rows_of(found.get("overhead", {}))
    if saves := found.get("saves"):
        saved = {name: saves[name] for name in CASES if name in saves}
        sizes = sorted({round(one["bytes"] / 1e6) for one in saved.values()})
        text += ABOUT_SAVES.format(bytes=" or ".join(f"{size:,}" for size in sizes))
        text += COLUMNS + rows_of(saved)
        text += "\nA turn, with its loop and one save, is longer by:\n\n"
        for name, one in saved.items():
            text += f"- {one['added'] * one['bare'] * one['steps']:.2f} s for {name}\n"
    if grown := found.get("growth"):
        held = grown["held"]
        steps = 10 * (held[1]["step"] - held[0]["step"])
        text += ABOUT_GROWTH.format(steps=steps, evaluates=steps // 20, saves=steps // 100)
        before: Found = {"step": 0, "seconds": 0.0}
        for one in held:
            each = (one["seconds"] - before["seconds"]) / (one["step"] - before["step"]) * 1e3
            cells = [f"{one['step']:,}", f"{one['megabytes']:.0f}", one["arrays"], one["threads"]]
            text += f"| {' | '.join(map(str, [*cells, one['files'], f'{each:.1f}']))} |\n"
            before = one
    return text


def main() -> None:
    name, *rest = sys.argv[1:] or ["page"]
    parts = {"overhead": overhead, "saves": saves, "growth": growth}
    if name in parts:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
        with tempfile.TemporaryDirectory() as folder:
            found = parts[name](Path(folder), *rest)
        write_rows(KNOWN, {**read(), name: found})
    write_text(str(RESULTS), page())


if __name__ == "__main__":
    main()
