"""Training in several processes beside one: losses, what each reads and writes, and kills.

    python benchmarks/processes.py share      4 processes × 2 devices, and 1 × 8
    python benchmarks/processes.py resume     4 → 2 → 1 processes, on three meshes
    python benchmarks/processes.py kills [N]  2 and 4 processes, of which one is killed
    python benchmarks/processes.py            writes benchmarks/results/processes.md

The first three keep what they find in processes.json. Nothing else may run beside them: where one
process compiles for half a minute longer than another, Gloo gives up the wait for it.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnx_pipeline.lab._files import write_text

RESULTS = Path(__file__).parent / "results" / "processes.md"
KNOWN = RESULTS.with_suffix(".json")
LONGEST = 600.0  # seconds until processes must have ended, on a machine that is busy
MODEL = (
    *("train", "--model", "tiny", "--set", "model.num_layers=8", "--set", "model.vocab_size=64"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=16"),
    *("--set", "model.dropout_rate=0.1", "--json", "-"),
)
Found = dict[str, Any]
# A process that trains, which tells what it has read, written and made.
PROCESS = """
import json, sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from nnx_pipeline.lab._cli.main import main
from nnx_pipeline.train.data import Rule

made, whole = set(), Rule.sequences
def sequences(self, batch, rows, length):
    made.update((batch, row) for row in rows)
    return whole(self, batch, rows, length)
Rule.sequences = sequences
told = sys.argv[2]
sys.argv[1:] = sys.argv[3:]
try:
    main()
finally:
    import tensorstore as ts
    names = {"read": "bytes_read", "written": "bytes_written"}
    found = {"rows": len(made)}
    for key, name in names.items():
        metrics = ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/file/{name}")
        found[key] = sum(one["value"] for metric in metrics for one in metric["values"])
    with open(told, "w") as file:
        json.dump(found, file)
"""


class Group:
    """The processes of one training."""

    def __init__(self, folder: Path, count: int, mesh: str, options: Sequence[str]) -> None:
        self.folder, self.count = folder, count
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = []
        for number in range(count):
            words = [*MODEL, "--mesh", mesh, *options]
            if count > 1:
                words += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
                words += ["--process-id", str(number)]
            self.processes.append(self._start(number, words))

    def _start(self, number: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
        told = [str(self.folder / "programs"), str(self.folder / f"told{number}")]
        with (
            open(self.folder / f"out{number}", "wb") as out,
            open(self.folder / f"err{number}", "wb") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "-c", PROCESS, *told, *words],
                stdin=subprocess.PIPE,  # at whose end a watched process ends
                stdout=out,
                stderr=err,
                env={**os.environ, "NNX_PIPELINE_WATCHED": "1"},
            )

    def wait(self) -> Found:
        """What process 0 has written, and what each has told; raises RuntimeError."""
        codes = [process.wait(LONGEST) for process in self.processes]
        if any(codes):
            said = [(self.folder / f"err{n}").read_text() for n in range(self.count)]
            raise RuntimeError(f"{codes}: {said}")
        told = [json.loads((self.folder / f"told{n}").read_text()) for n in range(self.count)]
        return {**json.loads((self.folder / "out0").read_text()), "told": told}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def trained(folder: Path, count: int, mesh: str, *options: str, run: Path | None = None) -> Found:
    """A training to its end."""
    saved = () if run is None else ("--checkpoint-dir", str(run))
    group = Group(folder, count, mesh, (*options, *saved))
    try:
        return group.wait()
    finally:
        group.end()


def apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of two losses, as a share."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


SCHEDULES = {
    "circular": ("--set", "pipeline.num_repeats=2"),
    "1f1b": ("--set", "pipeline.schedule=1f1b"),
}
SHARED = ("stage=4,fsdp=2", "data=4,fsdp=2")  # what is between the processes comes first


def share(folder: Path) -> Found:
    """4 processes × 2 devices beside one × 8: losses, and what each makes, writes and reads."""
    found = {}
    for mesh in SHARED:
        for name, options in SCHEDULES.items():
            if name == "1f1b" and not mesh.startswith("stage"):
                continue
            steps, more = ("--steps", "6"), ("--steps", "8", "--resume")
            run, alone = folder / "run4", folder / "run1"
            one = trained(folder, 1, mesh, *options, *steps, run=alone)
            four = trained(folder, 4, mesh, *options, *steps, run=run)
            again = trained(folder, 4, mesh, *options, *more, run=run)
            found[f"{mesh}, {name}"] = {
                "apart": apart(four["losses"], one["losses"]),
                "rows": [each["rows"] for each in four["told"]],
                "rows_of_one": one["told"][0]["rows"],
                "written": [each["written"] for each in four["told"]],
                "written_by_one": one["told"][0]["written"],
                "read": [each["read"] for each in again["told"]],
            }
            for path in (run, alone):
                shutil.rmtree(path)
    return found


MOVES = ((4, "stage=4,fsdp=2"), (2, "stage=2,fsdp=4"), (1, "fsdp=8"))


def resume(folder: Path) -> Found:
    """From 4 to 2 to 1 processes on other meshes, beside a run that never moved."""
    stay = trained(folder, 1, MOVES[0][1], "--steps", "12")
    losses: list[float] = []
    made: list[int] = []
    for at, (count, mesh) in enumerate(MOVES):
        options = ["--steps", str(4 * (at + 1)), *["--resume"] * (at > 0)]
        part = trained(folder, count, mesh, *options, run=folder / "run")
        losses += part["losses"]
        made.append(sum(each["rows"] for each in part["told"]))
    return {"apart": apart(losses, stay["losses"]), "steps": len(losses), "rows": made}


def kills(folder: Path, most: str = "20") -> Found:
    """Trainings of 2 and 4 processes, one of which is killed, then all: they go on, to the bit."""
    draw, found = random.Random(0), {}
    for count, mesh in ((2, "stage=2,fsdp=2"), (4, "stage=4,fsdp=2")):
        steps, every = 12, 2
        options = ("--steps", str(steps), "--save-every", str(every))
        began = time.monotonic()
        whole = trained(folder, count, mesh, *options, run=folder / "whole")
        lasts, done, runs, lost, unfinished = time.monotonic() - began, 0, 0, 0, 0
        while done < int(most) // 2:
            run, losses = folder / f"run{runs}", dict[int, float]()
            runs += 1
            while True:
                killed = _killed(folder, count, mesh, options, run, draw.uniform(2.0, lasts))
                newest = _newest(run)
                if not killed:
                    break
                done += 1
                unfinished += any(run.glob("*.incomplete"))
                lost = max(lost, _steps_told(run.with_suffix(".jsonl")) - newest)
            ended = [
                json.loads(line) for line in run.with_suffix(".jsonl").read_text().splitlines()
            ]
            losses = {line["step"]: line["loss"] for line in ended}
            assert [*losses.values()] == whole["losses"], (losses, whole["losses"])
            assert newest == steps, f"{run} ended at step {newest}"
            print(f"{count} processes: {done} kills, {runs} runs", file=sys.stderr, flush=True)
        found[str(count)] = {
            "kills": done,
            "runs": runs,
            "most_lost": lost,
            "every": every,
            "unfinished": unfinished,
        }
        for path in folder.glob("run*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(folder / "whole")
    return found


def _killed(
    folder: Path, count: int, mesh: str, options: Sequence[str], run: Path, after: float
) -> bool:
    """Trains, and kills one process after so many seconds, and soon all; whether it came to that.

    A cluster ends the other processes of a job too; test_train_processes.py waits for JAX to.
    """
    more = ["--resume"] if _newest(run) else []
    saved = ["--checkpoint-dir", str(run), "--metrics", str(run.with_suffix(".jsonl"))]
    group = Group(folder, count, mesh, [*options, *more, *saved])
    try:
        until = time.monotonic() + after
        while time.monotonic() < until:
            if all(process.poll() is not None for process in group.processes):
                break
            time.sleep(0.02)
        else:
            random.choice(group.processes).send_signal(signal.SIGKILL)
            time.sleep(0.5)
            return True
        group.wait()
        return False
    finally:
        group.end()


def _newest(run: Path) -> int:
    if not run.is_dir():
        return 0
    return max((int(path.name) for path in run.iterdir() if path.name.isdecimal()), default=0)


def _steps_told(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def read() -> Found:
    return json.loads(KNOWN.read_text("utf-8")) if KNOWN.exists() else {}


ABOUT = """# Training in several processes

Made by `python benchmarks/processes.py` on virtual CPU devices, with JAX 0.10.2 and Gloo: `tiny`
with 8 layers, a batch of 16 × 16 tokens and dropout, by `nnx-pipeline train`.

## Four processes of two devices beside one of eight

Six steps, a save, and two steps more after a resume. *Apart* is the largest relative difference of
a loss. Rows are the sequences that a process has made of all; bytes are those that TensorStore has
written, and read at the resume.

| mesh and schedule | apart | rows of each | of all | MB written | by one alone | MB read |
|---|--:|---|--:|---|--:|---|
"""
ABOUT_RESUME = """
## From four processes to two to one

Four steps each on {meshes}, beside twelve steps that never moved: losses are {apart:.1e} apart, and
the processes have made {rows} of {all} sequences, each once.
"""
ABOUT_KILLS = """
## Kills

A training saves every {every} steps. One of its processes is killed at a random moment, soon after
it the others, as a cluster does, and the same command goes on with `--resume`. That all losses are
those of a training that nobody killed, to the bit, is checked at the end of each.

| processes | kills | trainings | steps lost at most | left an unfinished step |
|--:|--:|--:|--:|--:|
"""


def in_megabytes(sizes: Sequence[int]) -> str:
    return " ".join(f"{size / 1e6:.1f}" for size in sizes)


def page() -> str:
    found, text = read(), ABOUT
    for name, one in found.get("share", {}).items():
        rows = " ".join(map(str, one["rows"]))
        written, alone = in_megabytes(one["written"]), in_megabytes([one["written_by_one"]])
        cells = [name, f"{one['apart']:.1e}", rows, one["rows_of_one"], written, alone]
        text += f"| {' | '.join(map(str, [*cells, in_megabytes(one['read'])]))} |\n"
    if moved := found.get("resume"):
        meshes = ", ".join(f"`{mesh}` in {count}" for count, mesh in MOVES)
        rows, every = sum(moved["rows"]), 16 * moved["steps"]
        text += ABOUT_RESUME.format(meshes=meshes, apart=moved["apart"], rows=rows, all=every)
    if killed := found.get("kills"):
        text += ABOUT_KILLS.format(every=next(iter(killed.values()))["every"])
        for count, one in killed.items():
            cells = [count, *(one[key] for key in ("kills", "runs", "most_lost", "unfinished"))]
            text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def main() -> None:
    name, *rest = sys.argv[1:] or ["page"]
    parts = {"share": share, "resume": resume, "kills": kills}
    if name in parts:
        os.environ["JAX_PLATFORMS"] = "cpu"
        with tempfile.TemporaryDirectory() as folder:
            found = parts[name](Path(folder), *rest)
        write_text(str(KNOWN), json.dumps({**read(), name: found}, indent=1) + "\n")
    write_text(str(RESULTS), page())


if __name__ == "__main__":
    main()
