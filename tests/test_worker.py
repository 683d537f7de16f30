"""Programs whose flags must be set before anything is imported run in a process of their own."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers import optax_promotion, small_config
from page_examples import attribution, measurement

from nnx_pipeline import MeshConfig
from nnx_pipeline.cli_options import platforms
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import worker
from nnx_pipeline.lab.arms import Arm, Program
from nnx_pipeline.lab.compile import Measurement, measure_step
from nnx_pipeline.lab.experiments import EXPERIMENTS
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.modules import Parts

CPU, MESH = Platform("cpu"), MeshConfig(fsdp=2)
CONFIG = small_config(model={"num_layers": 2})


def test_a_flag_reaches_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA refuses the flag that is no flag, and says so: it did get the environment."""
    program = Program(CONFIG, environment=(("XLA_FLAGS", "--xla_no_such_flag=1"),))
    with pytest.raises(RuntimeError, match="a process of its own ended with"):
        worker.measured(program, MESH, CPU)


def test_measured_elsewhere_is_measured_here() -> None:
    program = EXPERIMENTS["shard-variable"].programs(CONFIG, MESH)[1]
    assert program.environment == (("FLAX_ALWAYS_SHARD_VARIABLE", "false"),)
    there = worker.measured(program, MESH, CPU)
    assert isinstance(there, Measurement)
    assert there.memory.temp_bytes > 0
    assert there.attribution is not None
    assert there.measured is None
    assert there.mesh == MESH.sizes()
    with optax_promotion():
        here = measure_step(CONFIG, MESH, CPU)
    assert there.memory == here.memory
    assert there.flops == here.flops
    assert there.config == here.config


def test_every_variable_and_switch_reaches_the_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = (("FLAX_ALWAYS_SHARD_VARIABLE", "false"), ("A_LETTER", "x"))
    asked: dict[str, Any] = {}

    def ask(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.update(options)
        return subprocess.CompletedProcess(command, 0, '{"numbers": []}', "")

    monkeypatch.setattr(worker, "_run", ask)
    understood: list[Program] = []
    monkeypatch.setattr(
        worker, "loss_and_gradients_of", lambda program, *_: understood.append(program) or []
    )
    for segment_ids in (True, False):
        program = Program(CONFIG, environment=variables, segment_ids=segment_ids)
        assert worker.numbers(program, MESH) == []
        assert dict(variables).items() <= asked["env"].items()
        assert worker._answer(json.loads(asked["input"])) == {"numbers": []}
        assert understood.pop() == program._replace(environment=())


def test_what_it_measures_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of NVIDIA's matrix products, too."""
    asked: list[Platform] = []

    def measure(config: Any, mesh: Any, platform: Platform, **_: Any) -> Any:
        asked.append(platform)
        return measurement(attribution())

    def ask(command: list[str], input: str, **_: Any) -> subprocess.CompletedProcess[str]:
        answer = json.dumps(worker._answer(json.loads(input)))
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(worker, "measure_step", measure)
    monkeypatch.setattr(worker, "_run", ask)
    targets = [*platforms("cuda:h100:8", "both"), Platform.parse("cpu")]
    for target in targets:
        found = worker.measured(Program(CONFIG, environment=(("A", "x"),)), MESH, target)
        assert found.memory == measurement(attribution()).memory
    assert asked == targets


def test_numbers_come_back_to_the_bit() -> None:
    for array in (np.arange(6, dtype="float32").reshape(2, 3), np.float32(1.5)):
        back = worker._decoded(worker._encoded(np.asarray(array)))
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_errors_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = (("A", "1"),)
    with pytest.raises(InputError, match="choose a multiple of 3"):
        worker.measured(Program(CONFIG, environment=environment), MeshConfig(fsdp=3), CPU)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a process of its own ended with 1: it said nothing"):
        worker.numbers(Program(CONFIG, environment=environment), MESH)


def test_functions_do_not_reach_another_process() -> None:
    with pytest.raises(ValueError, match="arm x: functions do not reach another process"):
        Arm(
            label="x",
            environment=(("A", "1"),),
            parts=Parts(apply_norm_scale=lambda x, scale: x),
        )
