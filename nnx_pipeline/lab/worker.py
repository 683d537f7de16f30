"""Measures a program in a process of its own, for flags that are read when modules are imported.

    python -m nnx_pipeline.lab.worker

reads one JSON object on standard input and writes one on standard output. This process has the
program's environment; what is printed on the way goes to standard error.
"""

import base64
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nnx_pipeline import ending
from nnx_pipeline.config import SECTIONS, Config, to_dict
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.arms import Program
from nnx_pipeline.lab.compile import Measurement, measure_step
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.train import loss_and_gradients, make_state
from nnx_pipeline.train.data import learnable_batches


def measured(program: Program, mesh: MeshConfig, platform: Platform) -> Measurement:
    """The measurement of a program that has an environment; its text (`hlo`) stays behind.

    Raises InputError where the other process does, and RuntimeError with its last words where it
    fails.
    """
    answer = _ask(program, mesh, platform)
    return Measurement.from_cache(answer["measurement"], measured=None)


def numbers(program: Program, mesh: MeshConfig) -> list[np.ndarray]:
    """`loss_and_gradients_of` a program that has an environment, on virtual CPU devices."""
    return [_decoded(row) for row in _ask(program, mesh)["numbers"]]


def loss_and_gradients_of(
    program: Program, sizes: MeshConfig, devices: Sequence[Any]
) -> list[np.ndarray]:
    """Loss and gradients of fresh weights and one batch, both the same for every program."""
    config, parts, layout = program.config, program.parts, program.layout
    mesh = make_mesh(sizes, devices, sharding=config.pipeline.sharding)
    with jax.set_mesh(mesh):
        model = make_state(config, mesh, parts=parts, layout=layout).model
        batches = learnable_batches(config, mesh, layout=layout, segment_ids=program.segment_ids)
        (loss, _), gradients = jax.jit(loss_and_gradients)(model, next(batches))
    return [np.asarray(leaf) for leaf in (loss, *jax.tree.leaves(gradients))]


def _ask(program: Program, mesh: MeshConfig, platform: Platform | None = None) -> dict[str, Any]:
    """platform: what to measure for; without one the numbers are computed."""
    question = {
        "config": to_dict(program.config),
        "mesh": mesh.sizes(),
        "segment_ids": program.segment_ids,
        "platform": platform and str(platform),
        "gemm": platform and platform.gemm,
    }
    done = _run(
        [sys.executable, "-m", "nnx_pipeline.lab.worker"],
        input=json.dumps(question),
        env={**os.environ, **dict(program.environment)},
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(
            f"a process of its own ended with {done.returncode}: {words[-1]}"
        ) from None
    if "input_error" in answer:
        raise InputError(answer["input_error"])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def _run(
    command: list[str], *, input: str, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, but that the process ends when this one is told to."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
    with process, ending.cleared_away(functools.partial(_stop, process)):
        try:
            said, errors = process.communicate(input)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def _stop(process: subprocess.Popen[str]) -> None:
    """Has the process end and clear away what it began, or at least end."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    process.kill()


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    sections = {name: cls(**question["config"][name]) for name, cls in SECTIONS.items()}
    program = Program(Config(**sections), segment_ids=question["segment_ids"])
    mesh = MeshConfig(**question["mesh"])
    try:
        if question["platform"] is None:
            devices = Platform("cpu").devices(mesh.num_devices)
            rows = loss_and_gradients_of(program, mesh, devices)
            return {"numbers": [_encoded(row) for row in rows]}
        platform = dataclasses.replace(Platform.parse(question["platform"]), gemm=question["gemm"])
        result = measure_step(program.config, mesh, platform, segment_ids=program.segment_ids)
        return {"measurement": result.to_cache()}
    except InputError as error:
        return {"input_error": str(error)}
    except Exception as error:  # a compiler may break in any way: who asked says how
        return {"error": str(error).strip() or type(error).__name__}


def _encoded(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": array.shape, "data": data}


def _decoded(row: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(row["data"]), jax.numpy.dtype(row["dtype"]))
    return flat.reshape(row["shape"])


def main() -> None:
    """Answers one question."""
    ending.answer("a process of its own")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer_to:
        os.dup2(2, 1)
        answer_to.write(json.dumps(_answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
