"""Outcomes with made-up figures, for what is drawn and written of them."""

import dataclasses
from typing import Any

from nnx_pipeline.config.config import to_dict
from nnx_pipeline.config.presets import preset
from nnx_pipeline.experiments._registry import EXPERIMENTS
from nnx_pipeline.experiments._run import Numerics
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.attribution._result import Attribution, Buffer, Call, History
from nnx_pipeline.lab.attribution.account import Memory
from nnx_pipeline.lab.comparison.outcome import Outcome, compare_measurements
from nnx_pipeline.lab.compile.measure import Measurement

COUNT = {"ops": 3, "executed": 12, "bytes": 50_331_648}
VALUES = (
    ("saved residual", "f32[8,512,1024]", "dot_general", 16_777_216),
    ("scan carry", "bf16[4,8,512,1024]", "while/body/ppermute", 33_554_432),
    ("logits", "f32[2,1024,32000]", "loss/logsumexp", 12_800_000),
    ("gathered weight", "bf16[512,1024]", "all_gather", 8_388_608),
    ("activation", "bf16[2,8,1024,1024]", "attention/softmax", 6_291_456),
    ("padding", "", "", 4_096),
)

TIME = Time(
    basis="cycles",
    known_seconds=0.03531,
    compute_seconds=0.03531,
    collective_seconds=0.0114,
    exposed_seconds=0.01089,
    memory_wait_seconds=0.00005,
    host_seconds=0.0,
    step_seconds=0.04625,
    range_seconds=(0.03531, 0.04671),
    hfu=0.124,
    mfu=0.03,
    bubble_share=3 / 11,
    launches=8557,
    peak_flops=459e12,
)


def attribution(factor: float = 1.0) -> Attribution:
    """The values above, each so many times as large, the first of them named by a hostile line."""
    buffers = [
        Buffer(
            name=f"fusion.{index}",
            bytes=int(size * factor) if index < 2 else size,
            shape=shape,
            operation=f"jit(train_step)/jvp(Mixtral)/{operation}" if operation else "",
            source=f"nnx_pipeline/<b>{role}</b>.py:{index + 1}" if shape else None,
            role=role,
            first=10 * index,
            last=400 + index,
            call=1 + index % 2 if shape else None,
        )
        for index, (role, shape, operation, size) in enumerate(VALUES)
    ]
    buffers.sort(key=lambda buffer: -buffer.bytes)
    heap = sum(buffer.bytes for buffer in buffers)
    wave = [heap * min(at, 600 - at) // 300 for at in range(601)]
    line = tuple((at, size * (0.7 + 0.3 * (at % 50 < 25)) // 1) for at, size in enumerate(wave))
    points = [(at, int(size)) for at, size in line]
    points[300] = (300, heap)
    return Attribution(
        heap_bytes=heap,
        temp_bytes=heap + 1000,
        peak_position=300,
        buffers=tuple(buffers),
        other=(),
        timeline=tuple(points),
        calls=(
            Call(file="model/step.py", line=9, function="train_step", caller=None),
            Call(file="model/layer.py", line=4, function="Layer.<locals>.call", caller=0),
            Call(file="model/layer.py", line=7, function="Layer.<locals>.call", caller=0),
        ),
        history=history(tuple(buffers), points),
    )


def history(buffers: tuple[Buffer, ...], points: list[tuple[int, int]]) -> History:
    """At every fourth of the points the buffers, all in the same proportion."""
    chosen, heap = points[::4], sum(buffer.bytes for buffer in buffers)
    sizes = [[buffer.bytes * live // heap for buffer in buffers] for _, live in chosen]
    return History(
        positions=tuple(at for at, _ in chosen),
        roles=tuple(buffer.role for buffer in buffers),
        bytes=tuple(map(tuple, sizes)),
        buffers=buffers[:5],
        largest=tuple(tuple(enumerate(row[:5])) for row in sizes),
    )


def measurement(heap: Attribution | None, *, platform: str = "cuda:h100:8") -> Measurement:
    held = heap.heap_bytes if heap else None
    return Measurement(
        platform=platform,
        mesh={"stage": 4, "fsdp": 2},
        config=to_dict(preset("mixtral-small")),
        memory=Memory(
            argument_bytes=210_000_000,
            output_bytes=210_000_004,
            alias_bytes=210_000_000,
            temp_bytes=heap.temp_bytes if heap else 77_000_000,
            heap_bytes=held,
            constant_bytes=0 if heap else None,
            peak_bytes=None,
            generated_code_bytes=None,
            host_temp_bytes=0,
        ),
        flops=2_345_678_901_234,
        xla_flops=None,
        bytes_accessed=None,
        collectives={"all-gather": COUNT, "collective-permute": COUNT},
        seconds={"abstract_init": 0.31, "trace": 1.92, "lower": 0.5, "compile": 9.25},
        versions={"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "libtpu": None},
        hlo="ENTRY %main",
        attribution=heap,
    )


def outcome(name: str = "stage-shift", **changes: Any) -> Outcome:
    """Arm b holds two thirds of what arm a does."""
    a, b = measurement(attribution()), measurement(attribution(0.6))
    fields = b.config | {"pipeline": b.config["pipeline"] | {"shift": "slice"}}
    other = dataclasses.replace(b, config=fields, hlo="ENTRY %other")
    made = compare_measurements(EXPERIMENTS[name].question, a, other)
    same = Numerics(
        max_abs_diff=3e-8, bitwise_equal=False, within_tolerance=True, mesh="stage=4,fsdp=2"
    )
    return dataclasses.replace(made, numerics=same, **changes)
