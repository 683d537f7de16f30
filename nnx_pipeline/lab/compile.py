"""Compile one training step and read off what it costs."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from nnx_pipeline.config import Config, to_dict
from nnx_pipeline.equations import called_from_one_line
from nnx_pipeline.lab.attribution import Attribution
from nnx_pipeline.lab.heap import compile_with_dump, heap_bytes
from nnx_pipeline.lab.heap_profile import attribute
from nnx_pipeline.lab.hlo import fingerprint, parse
from nnx_pipeline.lab.hlo_cost import collective_counts, matmul_flops
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.modules import Parts
from nnx_pipeline.sharding import Layout
from nnx_pipeline.tracing import traced_afresh
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device, as the compiler reports them; None where it does not.

    temp_bytes is `temp_size_in_bytes`, heap_bytes the device-memory heap of the buffer assignment.
    On a TPU they are not the same: temp counts other memory spaces too. argument_bytes is what
    devices hold, host_argument_bytes what is passed in host memory.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    heap_bytes: int | None
    peak_bytes: int | None
    generated_code_bytes: int | None
    host_temp_bytes: int
    host_argument_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One compiled step, field by field what `compile --json` writes.

    hlo: its program as text, empty where the measurement comes from a cache, which keeps its
    fingerprint instead. attribution: what its heap holds, None where the
    compiler wrote no buffer assignment. device_memory_bytes: what one device has, None where that
    is not known; the NVIDIA compiler compiles programs that are larger. gemm: what NVIDIA's matrix
    products are, see `Platform`; None elsewhere. measured: when, in ISO
    format, if it comes from a cache. notes: what the program leaves out of what was declared, a
    sentence each.
    """

    platform: str
    mesh: dict[str, int]
    config: dict[str, Any]
    memory: Memory
    flops: int | None
    xla_flops: float | None
    bytes_accessed: float | None
    collectives: dict[str, dict[str, int | None]]
    seconds: dict[str, float]
    versions: dict[str, str | None]
    hlo: str = dataclasses.field(repr=False)
    kept_fingerprint: str = dataclasses.field(default="", repr=False)
    attribution: Attribution | None = dataclasses.field(default=None, repr=False)
    device_memory_bytes: int | None = None
    gemm: str | None = None
    measured: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The same for the same program, wherever in the source it comes from."""
        return self.kept_fingerprint or fingerprint(self.hlo)

    @property
    def needed_bytes(self) -> int:
        """Arguments, what results need beyond those given up for them, and the heap (or temp)."""
        memory = self.memory
        working = memory.temp_bytes if memory.heap_bytes is None else memory.heap_bytes
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes + working

    @property
    def exceeds_device_memory(self) -> bool | None:
        """Whether the program is too large for a device; None where its memory is not known."""
        size = self.device_memory_bytes
        return None if size is None else self.needed_bytes > size

    def to_json(self) -> dict[str, Any]:
        """The JSON of the contract."""
        fields = dataclasses.asdict(dataclasses.replace(self, hlo="", attribution=None))
        for name in ("hlo", "kept_fingerprint", "attribution", "measured"):
            del fields[name]
        return {"schema": 1, **fields, "exceeds_device_memory": self.exceeds_device_memory}

    def to_cache(self) -> dict[str, Any]:
        """All but the text of the program, as JSON can hold it."""
        fields = dataclasses.asdict(dataclasses.replace(self, hlo="", attribution=None))
        attribution = self.attribution.to_json() if self.attribution else None
        return {**fields, "attribution": attribution, "kept_fingerprint": self.fingerprint}

    @classmethod
    def from_cache(cls, value: Mapping[str, Any], measured: str | None) -> "Measurement":
        """The inverse of `to_cache`; KeyError or TypeError for what that has not written."""
        rows = value["attribution"]
        changed = {
            "memory": Memory(**value["memory"]),
            "attribution": None if rows is None else Attribution.from_json(rows),
            "measured": measured,
            "notes": tuple(value.get("notes", ())),
            "hlo": "",
        }
        return cls(**{**value, **changed})


def measure_step(
    config: Config,
    mesh_config: MeshConfig,
    platform: Platform,
    *,
    parts: Parts = Parts(),
    layout: Layout = Layout(),
    segment_ids: bool = False,
    virtual_cpus: int = 1,
    progress: Progress = lambda text: None,
) -> Measurement:
    """Traces, lowers and compiles one training step, without a byte of parameters.

    segment_ids: whether the batch has them. virtual_cpus: CPU devices that other work of this
    process needs beside it.
    Raises InputError when config, mesh and platform do not fit together.
    """
    config.check_mesh(mesh_config)
    devices = platform.devices(
        max(virtual_cpus, mesh_config.num_devices if platform.kind == "cpu" else 1)
    )
    mesh = make_mesh(mesh_config, devices, sharding=config.pipeline.sharding)
    clock = Clock(progress)
    with jax.set_mesh(mesh), traced_afresh():
        with clock("abstract_init", "building the model abstractly"):
            state = abstract_state(config, mesh, layout=layout, parts=parts)
            batch = abstract_batch(config, mesh, layout=layout, segment_ids=segment_ids)
        with clock("trace", "tracing the training step"):
            traced = jit_train_step(state, mesh).trace(state, batch)
        return measure_traced(traced, platform, clock, mesh_config.sizes(), to_dict(config))


def measure_traced(
    traced: jax.stages.Traced,
    platform: Platform,
    clock: "Clock",
    mesh: dict[str, int],
    config: dict[str, Any],
) -> Measurement:
    """Lowers and compiles a traced program; to be called under its mesh.

    mesh, config: what the measurement says of where it comes from.
    """
    with clock("lower", "lowering it"):
        lowered = traced.lower()
    with clock("compile", f"compiling for {platform}"):
        compiled, buffers = compile_with_dump(lowered, platform.compiler_options)
    clock.progress("reading the compiled program")
    hlo = compiled.as_text() or ""
    module = parse(hlo)
    costs = _cost_analysis(compiled)
    memory = _memory(compiled, heap_bytes(buffers))
    return Measurement(
        platform=str(platform),
        mesh=mesh,
        config=config,
        memory=memory,
        flops=matmul_flops(module),
        xla_flops=costs.get("flops"),
        bytes_accessed=costs.get("bytes accessed"),
        collectives=collective_counts(module),
        device_memory_bytes=platform.memory_bytes(),
        gemm=platform.gemm if platform.kind == "cuda" else None,
        seconds=clock.seconds,
        versions=_versions(platform),
        hlo=hlo,
        attribution=attribute(
            buffers, module, memory.temp_bytes, called_from_one_line(traced.jaxpr)
        ),
    )


def _memory(compiled: Any, heap: int | None) -> Memory:
    analysis = compiled.memory_analysis()
    return Memory(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        heap_bytes=heap,
        peak_bytes=analysis.peak_memory_in_bytes or None,
        # No program has no code: the NVIDIA and CPU compilers leave this field empty.
        generated_code_bytes=analysis.generated_code_size_in_bytes or None,
        host_temp_bytes=analysis.host_temp_size_in_bytes,
        host_argument_bytes=analysis.host_argument_size_in_bytes,
    )


def _cost_analysis(compiled: Any) -> dict[str, float]:
    """XLA's own analysis; the deviceless NVIDIA compiler has none."""
    costs = compiled.cost_analysis()
    if isinstance(costs, list):
        costs = costs[0] if costs else None
    return {key: value for key, value in (costs or {}).items() if value >= 0}


def _versions(platform: Platform) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"libtpu": None, **platform.versions()}
    return {**versions, "python": ".".join(map(str, sys.version_info[:3]))}


class Clock:
    """Times named phases and says what is going on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, doing: str) -> "Clock":
        self.progress(doing)
        self.name = name
        return self

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.started, 3)
