"""`nnx-pipeline train` in several processes: its options, and what is said when one is lost."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from documents import BLOCKS
from helpers import Run, script, user_environment

from nnx_pipeline import InputError
from nnx_pipeline.train._cli.hosts import Hosts
from nnx_pipeline.train._cli.train import train_command
from nnx_pipeline.train._cli.watching import why

SMALL = (
    *("--model", "tiny", "--set", "model.num_layers=2", "--set", "model.vocab_size=64"),
    *("--set", "train.sequence_length=16", "--set", "train.global_batch=8"),
)
JOINED = ("--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "0")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--num-processes", "2"), "--process-id belong together; give all three, or --distrib"),
        (("--distributed",), "give --num-processes N, or --platform local"),
        ((*JOINED[:-1], "2"), "--process-id 2 of --num-processes 2 is not there; the processes"),
        ((*JOINED[:-3], "3", *JOINED[-2:]), "4 devices of mesh fsdp=4 do not split over the proc"),
        (("--restart", "1"), "--restart 1 is about a training in several processes; give --distri"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: tuple[str, ...], told: str, run: Run) -> None:
    ended = run("train", *SMALL, "--mesh", "fsdp=4", "--steps", 1, *options)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert told in ended.err


HOSTS = Hosts(mesh="stage=4", platform="cpu", num_processes=4, process_id=1)
# As JAX 0.10 and 0.12 write them.
OTHER_LOST = """\
E1129 05:45:18.345405    6088 coordination_service_agent.cc:289] Polled an error from coordination \
service (this can be an error from this or another task).
F1129 05:45:18.345548    6088 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped \
sending heartbeats):
3
The tasks have crashed. Check the task logs for an earlier error
"""
FIRST_LOST = """\
F1129 05:45:20.657111    6432 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. \
Either the leader task was preempted
"""
CUT_OFF = """\
F1129 16:48:18.981911    8740 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/Heartbeat
"""

NOT_ALL = CUT_OFF.replace("Heartbeat", "RegisterTask")


@pytest.mark.parametrize(
    ("code", "messages", "told"),
    [
        (0, "", None),
        (1, "", None),
        (-signal.SIGKILL, "", "process 1 of 4 was ended by signal 9"),
        (-signal.SIGABRT, OTHER_LOST, "process 3 of 4 was lost, which sent no sign of life any"),
        (-signal.SIGABRT, FIRST_LOST, "process 0 of 4 was lost, which coordinates the others"),
        (
            -signal.SIGABRT,
            CUT_OFF,
            "process 0 of 4, which coordinates the others, could not be",
        ),
        (-signal.SIGABRT, NOT_ALL, "process 1 of 4 waited for minutes at the coordinator, which"),
        (-signal.SIGABRT, "of another kind", "JAX has ended process 1 of 4, and says above why"),
    ],
)
def test_why_a_process_has_ended(
    code: int, messages: str, told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = why(code, messages, HOSTS)
    assert found == told or (told is not None and (found or "").startswith(told))
    assert capsys.readouterr().err == ("of another kind\n" if "another kind" in messages else "")


def test_each_process_has_as_much_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 3)
    devices = [SimpleNamespace(process_index=number // 2) for number in range(6)]
    HOSTS._check_shares(SimpleNamespace(devices=np.array(devices)))
    with pytest.raises(InputError, match="has 2 of the devices of process 0 and 0 of process 2, a"):
        HOSTS._check_shares(SimpleNamespace(devices=np.array(devices[:4])))


def commands_for_hosts() -> Iterator[str]:
    """The commands of docs/train.md for several hosts, by hand, on SLURM and on Kubernetes."""
    for block in BLOCKS:
        if block.language == "yaml" and "kind" in (found := yaml.safe_load(block.text)):
            assert found["spec"]["completionMode"] == "Indexed"
            (container,) = found["spec"]["template"]["spec"]["containers"]
            assert container["command"] == ["sh", "-c"]
            yield container["args"][0].replace("$JOB_COMPLETION_INDEX", "3")
        elif block.language == "text" and block.text.startswith(("#!/bin/sh", "host0$")):
            yield next(line for line in block.text.splitlines() if "nnx-pipeline train" in line)


def test_the_commands_of_the_page() -> None:
    commands = [*commands_for_hosts()]
    assert len(commands) == 3
    for command in commands:
        words = command.partition("nnx-pipeline train ")[2].split()
        given = train_command.make_context("train", words).params
        sizes = Hosts(given["mesh"], given["platform"]).mesh_config
        read = {name: given[name] for name in ("distributed", "coordinator", "num_processes")}
        Hosts(given["mesh"], "local", **read, process_id=given["process_id"]).check()
        assert sizes.num_devices % (given["num_processes"] or 4) == 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def trained(
    folder: Path, *options: str, slurm: bool = False, count: int = 2, of_last: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The command in several processes, each of which writes to files beside the folder."""
    port, processes = free_port(), []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            words = ("train", *SMALL, "--mesh", "stage=2,fsdp=2", *options)
            words += ("--checkpoint-dir", str(folder), "--num-processes", str(count), "--json", "-")
            words += (*of_last,) if number == count - 1 else ()
            environment = user_environment()
            if slurm:
                names = ("STEP_NODELIST", "JOB_ID", "NTASKS", "PROCID", "LOCALID")
                values = ("localhost", str(port), str(count), str(number), str(number))
                environment |= {f"SLURM_{n}": v for n, v in zip(names, values, strict=True)}
                words += ("--distributed",)
            else:
                words += ("--coordinator", f"127.0.0.1:{port}", "--process-id", str(number))
            out = stack.enter_context(open(folder.with_suffix(f".out{number}"), "w"))
            err = stack.enter_context(open(folder.with_suffix(f".err{number}"), "w"))
            command = [sys.executable, "-c", script("nnx_pipeline"), *words]
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def wait_for(step: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + 300
    while not step.exists():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)


def child_of(process: subprocess.Popen[bytes]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


@pytest.mark.slow
def test_a_training_begins_again_after_a_kill(run: Run, tmp_path: Path) -> None:
    """By `--restart`, in both processes, with the losses of one process without a stop."""
    steps = ("--steps", "40")
    options = ("--save-every", "10", "--restart", "1")
    with trained(tmp_path / "run", *steps, *options) as processes:
        wait_for(tmp_path / "run" / "10", processes)
        os.kill(child_of(processes[1]), signal.SIGKILL)
        codes = [process.wait(300) for process in processes]
    said = [(tmp_path / f"run.err{number}").read_text() for number in range(2)]
    assert codes == [0, 0], said
    assert "process 1 of 2 was lost, which sent no sign of life any more; it begins" in said[0]
    assert "process 1 of 2 was ended by signal 9; it begins again" in said[1]
    found = json.loads((tmp_path / "run.out0").read_text())
    assert (tmp_path / "run.out1").read_text() == ""
    words = ("train", *SMALL, "--mesh", "stage=2,fsdp=2", *steps, "--json", "-")
    alone = run(*words).json["losses"]
    assert found["resumed_after"] >= 10
    assert found["losses"] == pytest.approx(alone[found["resumed_after"] :], rel=1e-5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("count", [1, 2])
def test_all_stop_at_sigterm(count: int, tmp_path: Path) -> None:
    """After the same step, whichever process it comes to, with exit code 0; on SLURM."""
    with trained(tmp_path / "run", "--steps", "1000000", slurm=True, count=count) as processes:
        until = time.monotonic() + 300
        while not re.search(r"training: [1-9]\d* of", (tmp_path / "run.err0").read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        processes[-1].terminate()
        codes = [process.wait(300) for process in processes]
    said = (tmp_path / "run.err0").read_text()
    assert codes == [0] * count, said
    (step,) = [path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()]
    assert f"SIGTERM came, and step {step} is saved" in said


def test_processes_that_train_something_else(tmp_path: Path) -> None:
    """They are refused before any work; each on its own would not see it."""
    other = ("--seed", "5", "--set", "train.learning_rate=0.1")
    with trained(tmp_path / "run", "--steps", "1", of_last=other) as processes:
        codes = [process.wait(300) for process in processes]
    said = [(tmp_path / f"run.err{number}").read_text() for number in range(2)]
    assert codes == [2, 2], said
    rule = "process 1 has another value than process 0 of train.learning_rate, --seed; give all"
    assert all(rule in one for one in said), said
    assert not (tmp_path / "run").exists()
