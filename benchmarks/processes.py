"""Training in several processes beside one: losses, what each reads and writes, and kills.

    python benchmarks/processes.py share      4 processes × 2 devices, and 1 × 8
    python benchmarks/processes.py resume     4 → 2 → 1 processes, on three meshes
    python benchmarks/processes.py kills [N]  2 and 4 processes, of which one is killed
    python benchmarks/processes.py restarts [N]  the same with --restart, by JAX's own detection
    python benchmarks/processes.py faults     what the others say of a lost process, and when
    python benchmarks/processes.py stores     2 processes that save in object stores, and are killed
    python benchmarks/processes.py            writes benchmarks/results/processes.md

All but the last keep what they find in processes.json. Nothing else may run beside them: where one
process compiles for half a minute longer than another, Gloo gives up the wait for it.
"""

import contextlib
import functools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept_rows import write_rows

from nnx_pipeline.lab._files import place, write_text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from object_stores import BUCKET, SERVERS, environment

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
# Of several processes JAX has the first one alone write to this cache, and on CPUs each has
# programs of its own. There is no option for that.
from jax._src import compiler, distributed
write = compiler._cache_write
def write_own(*given):
    state = distributed.global_state
    number, state.process_id = state.process_id, 0
    try:
        write(*given)
    finally:
        state.process_id = number
compiler._cache_write = write_own
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


COMMAND = "from nnx_pipeline.lab._cli.main import main; main()"


class Network:
    """A way to a port of this machine that can be cut, so that nothing comes through any more."""

    def __init__(self, port: int) -> None:
        self._to, self.is_up = port, True
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            here, _ = self._listening.accept()
            try:
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # process 0 does not listen yet
                here.close()
                continue
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end has gone
            while data := one.recv(65536):
                while not self.is_up:
                    time.sleep(1)
                other.sendall(data)
        other.close()


class Group:
    """The processes of one training: the command itself where they are `watched`, and else the
    process that it would watch, which tells more."""

    def __init__(
        self, folder: Path, count: int, mesh: str, options: Sequence[str], watched: bool = False
    ) -> None:
        self.folder, self.count, self.watched = folder, count, watched
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.network = Network(port)  # of the last process
        self.processes = []
        for number in range(count):
            words = [*MODEL, "--mesh", mesh, *options]
            if count > 1:
                way = self.network.port if number == count - 1 else port
                words += ["--coordinator", f"127.0.0.1:{way}", "--num-processes", str(count)]
                words += ["--process-id", str(number)]
            self.processes.append(self._start(number, words))

    def _start(self, number: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
        programs = str(self.folder / "programs")
        code = [PROCESS, programs, str(self.folder / f"told{number}")]
        more = {"NNX_PIPELINE_WATCHED": "1"}
        if self.watched:
            code = [COMMAND]
            more = {"JAX_COMPILATION_CACHE_DIR": programs}
            more |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with (
            open(self.folder / f"out{number}", "wb") as out,
            open(self.folder / f"err{number}", "wb") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "-c", *code, *words],
                stdin=subprocess.PIPE,  # at whose end a watched process ends
                stdout=out,
                stderr=err,
                env={**os.environ, **more},
            )

    def trains(self, number: int) -> int | None:
        """The id of the process that a watching one has started, if it is there."""
        watching = self.processes[number].pid
        found = Path(f"/proc/{watching}/task/{watching}/children").read_text().split()
        return int(found[0]) if found else None

    def said(self, number: int) -> str:
        return (self.folder / f"err{number}").read_text()

    def wait(self) -> Found:
        """What process 0 has written, and what each has told; raises RuntimeError."""
        codes = [process.wait(LONGEST) for process in self.processes]
        if any(codes):
            raise RuntimeError(f"{codes}: {[self.said(n) for n in range(self.count)]}")
        told = [json.loads((self.folder / f"told{n}").read_text()) for n in range(self.count)]
        return {**json.loads((self.folder / "out0").read_text()), "told": told}

    def end(self) -> None:
        for number, process in enumerate(self.processes):
            child = self.trains(number) if process.poll() is None else None
            if child is not None:  # which may be stopped
                os.kill(child, signal.SIGKILL)
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


SIZES = ((2, "stage=2,fsdp=2"), (4, "stage=4,fsdp=2"))
STEPS, EVERY = 8, 2


@dataclass
class Killed:
    """Trainings of which processes are killed, beside one of which none is."""

    folder: Path
    count: int
    mesh: str
    steps: int
    every: int

    def __post_init__(self) -> None:
        self.draw = random.Random()
        self.losses = self._whole()["losses"]

    @functools.cached_property
    def lasts(self) -> float:
        """Seconds of a training whose programs are compiled."""
        began = time.monotonic()
        self._whole()
        return time.monotonic() - began

    def _whole(self) -> Found:
        whole = trained(self.folder, self.count, self.mesh, *self.options, run=self.run(0))
        shutil.rmtree(self.run(0))
        return whole

    def run(self, number: int) -> Path:
        return self.folder / f"run{number}"

    @property
    def options(self) -> list[str]:
        fewer = ["--set", "model.num_layers=4"]  # which start sooner
        return ["--steps", str(self.steps), "--save-every", str(self.every), *fewer]

    def start(self, run: Path, *more: str, watched: bool = False) -> Group:
        told = ["--checkpoint-dir", str(run), "--metrics", str(run.with_suffix(".jsonl"))]
        return Group(self.folder, self.count, self.mesh, [*self.options, *told, *more], watched)

    def check(self, run: Path) -> None:
        """Raises AssertionError unless the training has all losses and has saved its end."""
        lines = map(json.loads, run.with_suffix(".jsonl").read_text().splitlines())
        losses = {line["step"]: line["loss"] for line in lines}
        assert [*losses.values()] == self.losses, (losses, self.losses)
        assert _newest(run) == self.steps, f"{run} ended at step {_newest(run)}"


def kills(folder: Path, most: str = "20") -> Found:
    """Trainings of 2 and 4 processes, one of which is killed, then all: they go on, to the bit.
    Adds to the kills that are known."""
    found = read().get("kills", {})
    for count, mesh in SIZES:
        (own := folder / str(count)).mkdir()
        killed, nothing = Killed(own, count, mesh, STEPS, EVERY), {"foreground": 0, "background": 0}
        one = {"kills": 0, "runs": 0, "unfinished": 0, "lost": nothing} | found.get(str(count), {})
        until = one["kills"] + int(most) // 2
        while one["kills"] < until:
            one["runs"] += 1
            run = killed.run(one["runs"])
            _train_and_kill(killed, run, one)
            killed.check(run)
            found[str(count)] = one
            keep("kills", found)
            print(f"{count} processes: {one}", file=sys.stderr, flush=True)
    return found


def _train_and_kill(killed: Killed, run: Path, one: Found) -> None:
    """Trains to the end, whatever is killed; counts it in `one`."""
    while True:
        before, where = _newest(run), killed.draw.choice([*one["lost"]])
        if not _killed(killed, run, where):
            return
        one["kills"] += 1
        one["unfinished"] += any(run.glob("*.incomplete"))
        newest = _newest(run)
        lost = one["lost"][where] = max(one["lost"][where], _steps_told(run) - newest)
        # In the background a step is whole when the next one is due, at the latest.
        assert lost <= (EVERY if where == "foreground" else 2 * EVERY), one
        assert newest >= before


def _killed(killed: Killed, run: Path, where: str) -> bool:
    """Trains, kills one process at a moment, and soon all; whether it came to that.

    Half of the moments are drawn over the time of a process, and half after a step, which is when
    steps are saved. A cluster ends the other processes of a job too; `restarts` has JAX do it.
    """
    newest = _newest(run)
    more = ["--resume"] if newest else []
    more += ["--save-in-background"] if where == "background" else []
    draw, lasts = killed.draw, killed.lasts
    told = _steps_told(run) if newest else 0
    after, step = draw.uniform(0.1 * lasts, lasts), None
    if draw.random() < 0.5 and newest < STEPS:
        after, step = draw.uniform(0.0, 0.5), draw.randint(newest + 1, STEPS)
    lines = _lines(run) if told else 0
    group = killed.start(run, *more)
    try:
        if step is not None:
            while _lines(run) < lines + step - newest and group.processes[0].poll() is None:
                time.sleep(0.005)
        until = time.monotonic() + after
        while time.monotonic() < until:
            if all(process.poll() is not None for process in group.processes):
                break
            time.sleep(0.01)
        else:
            draw.choice(group.processes).send_signal(signal.SIGKILL)
            time.sleep(0.5)
            return True
        group.wait()
        return False
    finally:
        group.end()


def restarts(folder: Path, most: str = "8") -> Found:
    """The same by `--restart`: processes that lose another one end by themselves, and begin
    again."""
    found = {}
    for count, mesh in SIZES:
        (own := folder / str(count)).mkdir()
        each = int(most) // 2
        killed = Killed(own, count, mesh, 30 * each, 5)
        run = killed.run(1)
        group = killed.start(run, "--restart", str(each), watched=True)
        seconds = []
        try:
            for number in range(each):
                newest = _newest(run)
                while _newest(run) < newest + 5:
                    assert all(process.poll() is None for process in group.processes), group.said(0)
                    time.sleep(0.02)
                time.sleep(killed.draw.uniform(0.0, 2.0))
                children = [group.trains(number) for number in range(count)]
                victim = killed.draw.randrange(count)
                began = time.monotonic()
                os.kill(children[victim] or 0, signal.SIGKILL)
                while any(
                    group.said(other).count("it begins again") <= number for other in range(count)
                ):
                    assert time.monotonic() - began < LONGEST
                    time.sleep(0.1)
                seconds.append(time.monotonic() - began)
                print(f"{count} processes: {number + 1} kills", file=sys.stderr, flush=True)
            codes = [process.wait(LONGEST) for process in group.processes]
            assert codes == [0] * count, (codes, group.said(0))
        finally:
            group.end()
        killed.check(run)
        found[str(count)] = {"kills": each, "seconds": seconds}
    return found


def _kill(group: Group, number: int) -> None:
    os.kill(group.trains(number) or 0, signal.SIGKILL)


def _stop(group: Group, number: int) -> None:
    os.kill(group.trains(number) or 0, signal.SIGSTOP)


def _delay(group: Group, number: int) -> None:
    child = group.trains(number) or 0
    os.kill(child, signal.SIGSTOP)
    time.sleep(10)
    os.kill(child, signal.SIGCONT)


def _cut(group: Group, number: int) -> None:
    group.network.is_up = False


FAULTS: dict[str, tuple[int, Callable[[Group, int], None]]] = {
    "killed": (1, _kill),
    "killed, which coordinates": (0, _kill),
    "stopped by SIGSTOP": (2, _stop),
    "cut off from the coordinator": (3, _cut),
    "stopped for 10 seconds": (1, _delay),
}


def faults(folder: Path, *names: str) -> Found:
    """Four processes, of which one gets a fault: what the others say, and after how long. With
    `names` of faults only these, beside what is known of the others."""
    found = read().get("faults", {}) if names else {}
    for number, (fault, (victim, act)) in enumerate(FAULTS.items()):
        if names and fault not in names:
            continue
        run = folder / f"run{number}"
        options = ["--steps", "1000000", "--save-every", "20", "--checkpoint-dir", str(run)]
        group = Group(folder, 4, "stage=4", options, watched=True)
        others = [number for number in range(4) if number != victim or act is _cut]
        try:
            while _newest(run) < 20:
                assert all(process.poll() is None for process in group.processes), group.said(0)
                time.sleep(0.1)
            began = time.monotonic()
            act(group, victim)
            if act is _delay:
                newest = _newest(run)
                while _newest(run) <= newest + 20:
                    assert all(process.poll() is None for process in group.processes), group.said(0)
                    time.sleep(0.1)
                group.processes[2].terminate()
            codes = [group.processes[number].wait(LONGEST) for number in others]
            seconds = time.monotonic() - began
            lines = (group.said(number).splitlines()[-1:] for number in others)
            said = sorted({line for last in lines for line in last})
            found[fault] = {"process": victim, "seconds": seconds, "codes": codes, "said": said}
            keep("faults", {name: found[name] for name in FAULTS if name in found})
            print(fault, found[fault], file=sys.stderr, flush=True)
        finally:
            group.end()
    return found


def stores(folder: Path) -> Found:
    """Two processes that save in a bucket, on a server of this machine, of which each is killed
    once: their losses beside those of a training that saves on a disk."""
    logging.disable(logging.WARNING)  # servers tell of each request
    (count, mesh), found = SIZES[0], {}
    options = ("--steps", str(STEPS), "--save-every", str(EVERY))
    losses = trained(folder, count, mesh, *options, run=folder / "run")["losses"]
    for kind, server in SERVERS.items():
        name, run = folder / kind, f"{kind}://{BUCKET}/run"
        with server() as running:
            running.reset()
            os.environ |= environment(kind, running.url)
            for victim in (*range(count), None):
                words = ["--checkpoint-dir", run, "--metrics", str(name.with_suffix(".jsonl"))]
                words += ["--resume"] if victim != 0 else []
                _train_in_store(Group(folder, count, mesh, [*options, *words]), name, victim)
            told = {line["step"]: line["loss"] for line in map(json.loads, _told(name))}
            saved = sorted(int(path.name) for path in place(run).iterdir() if path.name.isdecimal())
        assert [*told.values()] == losses, (told, losses)
        found[kind] = {"processes": count, "kills": count, "saved": saved}
        print(kind, found[kind], file=sys.stderr, flush=True)
    return found


def _train_in_store(group: Group, name: Path, victim: int | None) -> None:
    """Trains to the end, or kills a process once a step was saved."""
    lines = _lines(name)
    try:
        if victim is None:
            group.wait()
            return
        while _lines(name) <= lines + EVERY:
            assert group.processes[0].poll() is None, group.said(0)
            time.sleep(0.005)
        group.processes[victim].kill()
        time.sleep(0.5)
    finally:
        group.end()


def _newest(run: Path) -> int:
    if not run.is_dir():
        return 0
    return max((int(path.name) for path in run.iterdir() if path.name.isdecimal()), default=0)


def _told(run: Path) -> list[str]:
    metrics = run.with_suffix(".jsonl")
    return metrics.read_text().splitlines() if metrics.is_file() else []


def _lines(run: Path) -> int:
    return len(_told(run))


def _steps_told(run: Path) -> int:
    return max((json.loads(line)["step"] for line in _told(run)), default=0)


def keep(name: str, found: Found) -> None:
    write_rows(KNOWN, {**read(), name: found})


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

Four steps each on {meshes},
beside twelve steps that never moved: losses are {apart:.1e} apart, and the processes have made
{rows} of {all} sequences, each once.
"""
ABOUT_KILLS = f"""
## Kills

A training saves every {EVERY} steps, in the foreground or in the background by chance. One of its
processes is killed at a random moment, the others half a second after it, as a cluster does, and
the same command goes on with `--resume`. Half of the moments are soon after a step. That all losses
are those of a training that nobody killed, to the bit, is checked at the end of each.

| processes | kills | trainings | steps lost at most | in the background | left an unfinished step |
|--:|--:|--:|--:|--:|--:|
"""
ABOUT_STORES = """
{count} processes that save in a bucket of `{kind}://`, on a server of this machine, and of which
each is killed once, have the losses of a training that saves on a disk, to the bit. The bucket has
the steps {saved}.
"""
ABOUT_RESTARTS = """
With `--restart` JAX finds out which process was lost, and all begin again by themselves. Losses are
the same to the bit. Seconds are those until all have said which one it was.

| processes | kills | seconds |
|--:|--:|--:|
"""
ABOUT_FAULTS = """
## What the other processes say

Of four processes one is lost. The last line of the others, and the seconds until all have ended:
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
        text += ABOUT_KILLS
        for count, one in killed.items():
            cells = [count, one["kills"], one["runs"], *one["lost"].values(), one["unfinished"]]
            text += f"| {' | '.join(map(str, cells))} |\n"
    if again := found.get("restarts"):
        text += ABOUT_RESTARTS
        for count, one in again.items():
            least, most = min(one["seconds"]), max(one["seconds"])
            text += f"| {count} | {one['kills']} | {least:.0f} to {most:.0f} |\n"
    for kind, one in found.get("stores", {}).items():
        saved = ", ".join(map(str, one["saved"]))
        text += ABOUT_STORES.format(count=one["processes"], kind=kind, saved=saved)
    if lost := found.get("faults"):
        text += ABOUT_FAULTS
        for fault, one in lost.items():
            said = "\n".join(one["said"])
            text += f"\nProcess {one['process']}, {fault}: {one['seconds']:.0f} s\n\n"
            text += f"```text\n{said}\n```\n"
    return text


def main() -> None:
    name, *rest = sys.argv[1:] or ["page"]
    parts = {part.__name__: part for part in (share, resume, kills, restarts, faults, stores)}
    if name in parts:
        os.environ["JAX_PLATFORMS"] = "cpu"
        with tempfile.TemporaryDirectory() as folder:
            keep(name, parts[name](Path(folder), *rest))
    write_text(str(RESULTS), page())


if __name__ == "__main__":
    main()
