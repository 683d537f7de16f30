"""Lowers a traced program, compiles it and measures what it costs."""

import contextlib
import dataclasses
import hashlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from nnx_pipeline.lab._hlo.cost import Unread
from nnx_pipeline.lab._hlo.module import fingerprint
from nnx_pipeline.lab._timing.devices import device_of
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab._timing.rate import Rate
from nnx_pipeline.lab._timing.result import KEYS, Time
from nnx_pipeline.lab.attribution._floor import Floor
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.attribution.account import Account, Assigned, Memory
from nnx_pipeline.lab.compile import _figures as figures
from nnx_pipeline.lab.compile._cache import Cache, restored
from nnx_pipeline.lab.compile._compiler import (
    TooLarge,
    compile_with_settings,
    heap_bytes,
    own_options,
)
from nnx_pipeline.lab.compile._lowering import lowered_without_devices
from nnx_pipeline.lab.compile._settings import COST_MODEL
from nnx_pipeline.lab.compile._tables import with_costs, with_tables
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.mesh import divided_over

Progress = Callable[[str], None]
_NO_CACHE = Cache(None)
_CACHE: ContextVar[Cache] = ContextVar("cache of compiled programs", default=_NO_CACHE)


@contextlib.contextmanager
def kept_in(cache: Cache) -> Iterator[None]:
    """A context in which this thread compiles no program that the cache has, and keeps the others.

    A program is known by its lowered text with its lines of source and those that call it, so that
    it may be a user's, and one that is measured from elsewhere counts as another.
    """
    token = _CACHE.set(cache)
    try:
        yield
    finally:
        _CACHE.reset(token)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The figures of one compiled program, most of which `measure --json` writes by the same names.

    - `platform`: what it was compiled for, as `Platform.parse` reads it.
    - `mesh`: the size of each mesh axis.
    - `dcn`: the axes that cross slices of a TPU, or hosts where there is one slice or none, each
      with the number of these along it.
    - `config`: what was compiled: the config, or the function and the shapes of its arguments.
    - `memory`: bytes per device, as the compiler reports them.
    - `flops`: floating-point operations of all matrix products, per device and step; None if they
      are not known of every product. `known_flops`: those of the products that can be read.
    - `xla_flops`, `bytes_accessed`: from XLA's own cost analysis; None where there is none.
    - `collectives`: `ops`, `executed` and `bytes` (of the results, per device) of each kind, per
      step.
    - `seconds`: how long each phase took, such as `trace`, `lower` and `compile`.
    - `versions`: of each package that decides what the compiler does; for `local` also the kind of
      `device`.
    - `hlo`: the compiled program as text; empty for a measurement from a cache, which keeps its
      `kept_fingerprint` instead.
    - `buffer_assignment`: the compiler's text of it; None where it wrote none, and from a cache.
    - `attribution`: what the heap holds at its peak; None where the compiler wrote no buffer
      assignment.
    - `assigned`: what lies in device memory outside the heap; None in the same case.
    - `time`: how long a step takes, by estimate; None where nothing is known of the devices.
    - `device_memory_bytes`: the memory of one device; None where that is not known. The NVIDIA
      compiler also compiles programs that are larger.
    - `gemm`: what NVIDIA's matrix products become, see `Platform`; None on other platforms.
    - `xla`, `xla_left_out`: the settings of the compiler that the user gave, by name; those of a
      named set that this compiler does not take.
    - `trace_host_bytes`: the most bytes that Python held on the host while the program was traced,
      in experiments that are about this figure.
    - `measured`: when, in ISO format, if the measurement comes from a cache.
    - `unread`: parts of the program that are missing from the figures that each entry names.
    - `notes`: what was declared and is not in the program, and what a figure counts beyond what
      runs, one sentence each.
    - `floor`: what any program for this step must hold and take; None for other programs.
    - `choices`: what was taken where the config leaves something open, by name; its entries are
      keys of the JSON.
    - `tokens`: of a step, on all devices; None where nothing says so.
    - `price`: of a chip for an hour, as the user gave it.
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
    buffer_assignment: str | None = dataclasses.field(default=None, repr=False)
    attribution: Attribution | None = dataclasses.field(default=None, repr=False)
    assigned: Assigned | None = dataclasses.field(default=None, repr=False)
    time: Time | None = dataclasses.field(default=None, repr=False)
    device_memory_bytes: int | None = None
    gemm: str | None = None
    xla: dict[str, bool | str] = dataclasses.field(default_factory=dict)
    xla_left_out: tuple[str, ...] = ()
    trace_host_bytes: int | None = None
    measured: str | None = None
    known_flops: int | None = None
    unread: tuple[Unread, ...] = ()
    notes: tuple[str, ...] = ()
    floor: Floor | None = None
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    tokens: int | None = None
    price: float | None = None
    dcn: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash that is the same for the same program, whatever source lines it comes from."""
        return self.kept_fingerprint or fingerprint(self.hlo)

    @property
    def is_of_cpu(self) -> bool:
        """Whether it is XLA's compiler for CPUs that gave the figures."""
        return "cpu" in (self.platform, self.versions.get("device"))

    def bytes_of(self, quantity: str) -> int | None:
        """A figure that a verdict may be about, in bytes; None where it is not known.

        - `quantity`: one of `comparison.outcome.Quantity`, such as `temp`.
        """
        if quantity == "trace_host":
            return self.trace_host_bytes
        size: int | None = getattr(self.memory, f"{quantity}_bytes")
        return size

    @property
    def account(self) -> Account:
        """What the program holds in device memory, row by row."""
        return Account.of(self.memory, self.assigned)

    @property
    def needed_bytes(self) -> int:
        """Bytes per device that must fit: the account, or the best that is known in its place.
        Without a buffer assignment temp stands for the heap, and constants are not counted."""
        memory = self.memory
        if memory.account_bytes is not None:
            return memory.account_bytes
        working = memory.temp_bytes if memory.heap_bytes is None else memory.heap_bytes
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes + (working or 0)

    @property
    def is_refused(self) -> bool:
        """Whether the compiler refused the program as too large, when it had placed all buffers."""
        return self.memory.temp_bytes is None

    @property
    def exceeds_device_memory(self) -> bool | None:
        """Whether the program is too large for a device; None where that is not known."""
        if self.is_refused:
            return True
        size = self.device_memory_bytes
        if size is None:
            return None
        if self.needed_bytes > size:
            return True
        # Without the account constants are missing, so that nothing says that the program fits.
        return None if self.memory.account_bytes is None else False

    @property
    def chips(self) -> int:
        """On how many chips it runs, some of which are two devices."""
        per_chip = Platform.parse(self.platform).devices_per_chip
        return math.ceil(math.prod(self.mesh.values()) / per_chip)

    @property
    def rate(self) -> Rate | None:
        """Tokens per second and their cost; None where tokens or the time of a step are unknown."""
        seconds = self.time.step_seconds if self.time else None
        if not self.tokens or not seconds:
            return None
        return Rate(chips=self.chips, tokens=self.tokens, seconds=seconds, price=self.price)

    def to_json(self) -> dict[str, Any]:
        """The measurement as `measure --json` writes it."""
        without = dataclasses.replace(self, hlo="", buffer_assignment=None, attribution=None)
        fields = dataclasses.asdict(without)
        for name in ("hlo", "buffer_assignment", "kept_fingerprint", "attribution", "assigned"):
            del fields[name]
        for name in ("measured", "choices"):
            del fields[name]
        for name in ("tokens", "price"):  # `rate` has them
            del fields[name]
        return {
            "schema": 1,
            **fields,
            "memory": self.memory.to_json(),
            "account": self.account.to_json(),
            "time": self.time.to_json() if self.time else dict.fromkeys(KEYS),
            "floor": self.floor.to_json() if self.floor else None,
            "rate": self.rate.to_json() if self.rate else None,
            **self.choices,
            "exceeds_device_memory": self.exceeds_device_memory,
            "fingerprint": self.fingerprint,
        }

    def to_cache(self) -> dict[str, Any]:
        """Every field but the text of the program, as values that JSON can hold."""
        kept = dataclasses.replace(
            self, hlo="", buffer_assignment=None, kept_fingerprint=self.fingerprint
        )
        return dataclasses.asdict(kept)

    @classmethod
    def from_cache(cls, value: Mapping[str, Any], measured: str | None) -> "Measurement":
        """The inverse of `to_cache`; `measured` is when that was stored, in ISO format. Raises
        KeyError or TypeError for a value that `to_cache` has not written."""
        found: Measurement = restored(cls, {**value, "measured": measured, "hlo": ""})
        return found


class _Read(NamedTuple):
    hlo: str
    program: figures.ProgramFigures
    memory: Memory
    costs: dict[str, float]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A lowered program, which any thread can compile and measure."""

    program: jax.stages.Lowered
    lines: figures.TracedLines
    links: Links | None  # None where nothing is known of the devices
    platform: Platform
    clock: "Clock"
    mesh: dict[str, int]
    dcn: dict[str, int]
    config: dict[str, Any]

    def measure(self) -> Measurement:
        """Compiles the program and measures it, or takes it from the cache of `kept_in`. One that
        the TPU compiler refuses as too large has the figures that do not need the rest of its work;
        what else the compiler raises is raised."""
        key = self._key()
        if (kept := _kept(key)) is not None:
            return kept
        platform, clock = self.platform, self.clock
        with clock("compile", f"compiling for {platform}"):
            compiled, text, applied, left_out = compile_with_settings(self.program, platform)
        clock.progress("reading the compiled program")
        if isinstance(compiled, TooLarge):
            found = self._refused(compiled, text)
        else:
            found = self._compiled(compiled, text)
        program = vars(found.program)
        python = ".".join(map(str, sys.version_info[:3]))
        measured = Measurement(
            platform=str(platform),
            mesh=self.mesh,
            dcn=self.dcn,
            config=self.config,
            memory=found.memory,
            xla_flops=found.costs.get("flops"),
            bytes_accessed=found.costs.get("bytes accessed"),
            device_memory_bytes=platform.memory_bytes(),
            gemm=platform.gemm if platform.is_gpu else None,
            xla=applied,
            xla_left_out=left_out,
            seconds=clock.seconds,
            versions={"libtpu": None, **platform.versions(), "python": python},
            hlo=found.hlo,
            buffer_assignment=text,
            **{**program, "notes": (*found.notes, *program["notes"])},
        )
        if key is not None:
            _CACHE.get().put(key, measured.to_cache())
        return measured

    def _key(self) -> str | None:
        """What the program is known by in the cache of `kept_in`; None where there is no cache."""
        if _CACHE.get().folder is None:
            return None
        from nnx_pipeline.lab.compile._cache_key import entry_key  # which imports Flax

        text = hashlib.sha256(self.program.as_text(debug_info=True).encode()).hexdigest()
        known = str((self.mesh, self.dcn, self.config))
        return entry_key(self.platform, "program", text, own_options(self.program), known)

    def _compiled(self, compiled: jax.stages.Compiled, text: str | None) -> _Read:
        hlo = with_tables(compiled.as_text() or "", compiled)
        if self.platform.compiler_options.get(COST_MODEL):
            hlo = with_costs(hlo, compiled)
        analysis: Any = compiled.memory_analysis()
        temp = analysis.temp_size_in_bytes
        program = figures.read_program(hlo, text, temp, self.lines, self.links)
        memory = _memory(analysis, heap_bytes(text), program.assigned)
        notes = [*figures.dropped_arguments(compiled), *figures.lost_donations(compiled, hlo)]
        notes += figures.scratch_at_run_time(hlo) if self.platform.kind == "cuda" else []
        if program.time and (why := self.platform.why_a_roofline):
            notes.append(f"the estimated time is a roofline, because {why}")
        return _Read(hlo, program, memory, _cost_analysis(compiled), notes)

    def _refused(self, refused: TooLarge, text: str | None) -> _Read:
        """What is known of a program that the compiler refused when it had placed all buffers. It
        stopped before it counted the cycles, so that there is no estimate of the time."""
        program = figures.read_program(refused.hlo, text, None, self.lines)
        heap, assigned = heap_bytes(text), program.assigned
        if heap is None or assigned is None:
            raise refused.error
        note = (
            f"the compiler refused the program when it had placed all buffers ({refused.reason}), "
            "so that its time, temp, peak and code are not known"
        )
        dropped = len(jax.tree.leaves(self.program.args_info)) - _parameters(refused.hlo)
        notes = [note, *([figures.in_no_figure(dropped)] if dropped else [])]
        return _Read(refused.hlo, program, assigned.memory(heap), {}, notes)


def lower_traced(
    traced: jax.stages.Traced,
    platform: Platform,
    clock: "Clock",
    mesh: dict[str, int],
    config: dict[str, Any],
) -> Lowered:
    """Lowers a traced program; to be called under its mesh. Raises InputError as
    `lowered_without_devices` does."""
    with lowered_without_devices(traced.jaxpr, platform), clock("lower", "lowering it"):
        program = traced.lower()
    return Lowered(
        program=program,
        lines=figures.TracedLines.of(traced.jaxpr),
        links=_links(platform),
        platform=platform,
        clock=clock,
        mesh=mesh,
        dcn=divided_over(jax.sharding.get_mesh()),
        config=config,
    )


def _kept(key: str | None) -> Measurement | None:
    known = _CACHE.get().get(key)
    try:
        return None if known is None else Measurement.from_cache(*known)
    except (KeyError, TypeError, ValueError):  # written by something else
        return None


def _links(platform: Platform) -> Links | None:
    """The devices of the ambient mesh and their links; None where nothing is known of them."""
    device = device_of(platform.kind, platform.target)
    if device is None:
        return None
    mesh = jax.sharding.get_mesh()
    devices = platform.devices(1)[:1] if mesh.empty else [*mesh.devices.flat]
    return Links.of(device, platform.topology, devices)


def _parameters(hlo: str) -> int:
    return len(re.findall(r" parameter\(\d+\)", hlo[hlo.index("\nENTRY ") :]))


def _memory(analysis: Any, heap: int | None, buffers: Assigned | None) -> Memory:
    names = ("argument", "output", "alias", "temp", "host_temp", "host_argument", "host_output")
    return Memory(
        **{f"{name}_bytes": getattr(analysis, f"{name}_size_in_bytes") for name in names},
        heap_bytes=heap,
        constant_bytes=buffers.constant_bytes if buffers else None,
        peak_bytes=analysis.peak_memory_in_bytes or None,
        # Every program has code: 0 is a field that the NVIDIA and CPU compilers leave empty.
        generated_code_bytes=analysis.generated_code_size_in_bytes or None,
    )


def _cost_analysis(compiled: Any) -> dict[str, float]:
    # The deviceless NVIDIA compiler has none.
    costs = compiled.cost_analysis()
    if isinstance(costs, list):
        costs = costs[0] if costs else None
    return {key: value for key, value in (costs or {}).items() if value >= 0}


class Clock:
    """Times phases, as in `with clock("lower", "lowering it"):`, and reports them by `progress`."""

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
