"""Compile one training step and read off what it costs."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nnx_pipeline.config import Config, to_dict
from nnx_pipeline.equations import called_from_one_line
from nnx_pipeline.lab.account import Account, Assigned, Memory
from nnx_pipeline.lab.attribution import Attribution
from nnx_pipeline.lab.heap import compile_with_dump, heap_bytes
from nnx_pipeline.lab.hlo import fingerprint
from nnx_pipeline.lab.hlo_unread import Unread
from nnx_pipeline.lab.platform import Platform
from nnx_pipeline.lab.program import read_program
from nnx_pipeline.mesh import MeshConfig, make_mesh
from nnx_pipeline.modules import Parts
from nnx_pipeline.sharding import Layout
from nnx_pipeline.tracing import traced_afresh
from nnx_pipeline.train import abstract_batch, abstract_state, jit_train_step

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One compiled step, field by field what `compile --json` writes.

    hlo: its program as text, empty where the measurement comes from a cache, which keeps its
    fingerprint instead. attribution, assigned: what its heap holds, and what lies outside of it;
    None where the compiler wrote no buffer assignment. device_memory_bytes: what one device has,
    None where that is not known; the NVIDIA compiler compiles programs that are larger. gemm: what
    NVIDIA's matrix products are, see `Platform`; None elsewhere. trace_host_bytes: the most that
    Python held on the host while the program was traced, for experiments that are about that.
    measured: when, in ISO format, if it comes from a cache. flops: None if it is not known of every
    product; known_flops: of those of which it is. unread: what of the program is in none of the
    figures that it names. notes: what the program leaves out of what was declared, and what a
    figure holds beyond what runs, a sentence each.
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
    assigned: Assigned | None = dataclasses.field(default=None, repr=False)
    device_memory_bytes: int | None = None
    gemm: str | None = None
    trace_host_bytes: int | None = None
    measured: str | None = None
    known_flops: int | None = None
    unread: tuple[Unread, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The same for the same program, wherever in the source it comes from."""
        return self.kept_fingerprint or fingerprint(self.hlo)

    def bytes_of(self, quantity: str) -> int | None:
        """A figure that a verdict may be about, see `arms.Quantity`; None where it is not known."""
        if quantity == "trace_host":
            return self.trace_host_bytes
        size: int | None = getattr(self.memory, f"{quantity}_bytes")
        return size

    @property
    def account(self) -> Account:
        """What the program holds in the memory of a device, row by row."""
        return Account.of(self.memory, self.assigned)

    @property
    def needed_bytes(self) -> int:
        """The account; without a buffer assignment temp stands for the heap, without constants."""
        memory = self.memory
        if memory.account_bytes is not None:
            return memory.account_bytes
        working = memory.temp_bytes if memory.heap_bytes is None else memory.heap_bytes
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes + working

    @property
    def exceeds_device_memory(self) -> bool | None:
        """Whether the program is too large for a device; None where that is not known."""
        size = self.device_memory_bytes
        if size is None:
            return None
        if self.needed_bytes > size:
            return True
        return None if self.memory.account_bytes is None else False

    def to_json(self) -> dict[str, Any]:
        """The JSON of the contract."""
        fields = dataclasses.asdict(dataclasses.replace(self, hlo="", attribution=None))
        for name in ("hlo", "kept_fingerprint", "attribution", "assigned", "measured"):
            del fields[name]
        told = {"memory": self.memory.to_json(), "account": self.account.to_json()}
        return {
            "schema": 1,
            **fields,
            **told,
            "exceeds_device_memory": self.exceeds_device_memory,
        }

    def to_cache(self) -> dict[str, Any]:
        """All but the text of the program, as JSON can hold it."""
        fields = dataclasses.asdict(dataclasses.replace(self, hlo="", attribution=None))
        attribution = self.attribution.to_json() if self.attribution else None
        return {**fields, "attribution": attribution, "kept_fingerprint": self.fingerprint}

    @classmethod
    def from_cache(cls, value: Mapping[str, Any], measured: str | None) -> "Measurement":
        """The inverse of `to_cache`; KeyError or TypeError for what that has not written."""
        rows, beside = value["attribution"], value["assigned"]
        changed = {
            "memory": Memory(**value["memory"]),
            "assigned": None if beside is None else Assigned(**beside),
            "attribution": None if rows is None else Attribution.from_json(rows),
            "measured": measured,
            "unread": tuple(map(Unread.from_json, value["unread"])),
            "notes": tuple(value.get("notes", ())),
            "hlo": "",
        }
        return cls(**{**value, **changed})


def measure_step(
    config: Config,
    mesh_config: MeshConfig,
    platform: Platform,
    *,
    progress: Progress = lambda text: None,
) -> Measurement:
    """Traces, lowers and compiles one training step, without a byte of parameters.

    Raises InputError when config, mesh and platform do not fit together.
    """
    mesh = mesh_of(config, mesh_config, platform)
    clock = Clock(progress)
    with jax.set_mesh(mesh), traced_afresh():
        traced = trace_step(config, mesh, clock)
        return measure_traced(traced, platform, clock, mesh_config.sizes(), to_dict(config))


def mesh_of(config: Config, sizes: MeshConfig, platform: Platform, *, at_least: int = 1) -> Mesh:
    """The mesh of a config on a platform; InputError when the three do not fit together.

    at_least: CPU devices that other work of this process needs beside it.
    """
    config.check_mesh(sizes)
    devices = platform.devices(max(at_least, sizes.num_devices if platform.kind == "cpu" else 1))
    return make_mesh(sizes, devices, sharding=config.pipeline.sharding)


def trace_step(
    config: Config,
    mesh: Mesh,
    clock: "Clock",
    *,
    parts: Parts = Parts(),
    layout: Layout = Layout(),
    segment_ids: bool = False,
) -> jax.stages.Traced:
    """Traces one training step; to be called under the mesh. segment_ids: of the batch."""
    with clock("abstract_init", "building the model abstractly"):
        state = abstract_state(config, mesh, layout=layout, parts=parts)
        batch = abstract_batch(config, mesh, layout=layout, segment_ids=segment_ids)
    with clock("trace", "tracing the training step"):
        return jit_train_step(state, mesh).trace(state, batch)


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
        compiled, text = compile_with_dump(lowered, platform.compiler_options)
    clock.progress("reading the compiled program")
    hlo = compiled.as_text() or ""
    costs = _cost_analysis(compiled)
    analysis: Any = compiled.memory_analysis()
    one_line = called_from_one_line(traced.jaxpr)
    program = read_program(hlo, text, analysis.temp_size_in_bytes, one_line)
    memory = _memory(analysis, heap_bytes(text), program.assigned)
    return Measurement(
        platform=str(platform),
        mesh=mesh,
        config=config,
        memory=memory,
        flops=program.flops,
        known_flops=program.known_flops,
        xla_flops=costs.get("flops"),
        bytes_accessed=costs.get("bytes accessed"),
        collectives=program.collectives,
        device_memory_bytes=platform.memory_bytes(),
        gemm=platform.gemm if platform.kind == "cuda" else None,
        seconds=clock.seconds,
        versions=_versions(platform),
        hlo=hlo,
        attribution=program.attribution,
        assigned=program.assigned,
        unread=program.unread,
        notes=(*_dropped_arguments(compiled), *program.notes),
    )


def _dropped_arguments(compiled: jax.stages.Compiled) -> list[str]:
    """JAX drops arguments that nothing reads; whoever calls the program holds them all the same."""
    tree: Any
    arguments, tree = jax.tree.flatten(compiled.args_info)
    places = tree.flatten_up_to(compiled.input_shardings)
    sizes = [
        math.prod(argument.shape) * getattr(argument.dtype, "itemsize", 0)
        for argument, place in zip(arguments, places, strict=True)
        if place is None
    ]
    if not sizes:
        return []
    which = f"{len(sizes)} arguments are" if len(sizes) > 1 else "1 argument is"
    return [
        f"{which} in no figure, since nothing reads what is in {'them' if len(sizes) > 1 else 'it'}"
        f": {sum(sizes):,} bytes of whole arrays, which the caller holds"
    ]


def _memory(analysis: Any, heap: int | None, buffers: Assigned | None) -> Memory:
    return Memory(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        heap_bytes=heap,
        constant_bytes=buffers.constant_bytes if buffers else None,
        peak_bytes=analysis.peak_memory_in_bytes or None,
        # No program has no code: the NVIDIA and CPU compilers leave this field empty.
        generated_code_bytes=analysis.generated_code_size_in_bytes or None,
        host_temp_bytes=analysis.host_temp_size_in_bytes,
        host_argument_bytes=analysis.host_argument_size_in_bytes,
        host_output_bytes=analysis.host_output_size_in_bytes,
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
