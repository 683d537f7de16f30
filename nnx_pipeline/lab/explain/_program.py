"""Reads a program that others compiled: an `xla_dump_to` folder, or the text of one program."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nnx_pipeline.lab._files import MOST_TEXT, read_regular
from nnx_pipeline.lab._hlo.buffers import BufferText, has_allocations, read_buffers
from nnx_pipeline.lab._hlo.module import Module, Shape, parse
from nnx_pipeline.lab.attribution.account import Memory
from nnx_pipeline.lab.compile._compiler import ASSIGNMENT, read_dumped
from nnx_pipeline.lab.compile._figures import ProgramFigures, read_program
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

BEGINS_HLO = re.compile(r"\s*HloModule\s")
_DEVICE_BYTES = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_IN_DEVICE = re.compile(r"^(?!.*, color [1-9])")
# How libtpu names a generation in `target_arguments.txt`, with `lite` where it is that variant.
_TPUS = {
    "JELLYFISH": "v2",
    "DRAGONFISH": "v3",
    "PUFFERFISH": "v4",
    "VIPERFISH": "v5p",
    "VIPERFISH lite": "v5e",
    "GHOSTLITE": "v6e",
}
_MODULE = re.compile(
    r"(?P<stem>module_\d+\.(?P<name>.+?))\.(?:cl_\d+|(?:sm_|gfx)\w[\w.]*?_gpu_after|cpu_after"
    r"|after|before)"
)
_REFUSED = ".oom_intermediate_module.txt"  # what libtpu writes of a program that is too large
_NO_RANGES = (
    "the dump has no live ranges (…-live-range.txt): the size of the heap is known, and not what "
    "it holds at its peak"
)
_NO_HEAP = (
    "this is the text of a program without its buffer assignment: the heap is not known, only "
    "arguments, results and the arrays that the program makes. XLA_FLAGS=--xla_dump_to=FOLDER "
    "--xla_dump_hlo_as_text writes both; then explain FOLDER"
)


@dataclass(frozen=True, kw_only=True)
class ReadProgram(Measurement):
    """A `Measurement` of a program of which only texts are known.

    - `refused`: whether its compiler refused it as too large.
    """

    refused: bool = False

    @property
    def is_refused(self) -> bool:
        return self.refused


class Program(NamedTuple):
    """A program with what its figures were read from."""

    figures: ReadProgram
    module: Module | None  # None where its text is not there or cannot be read
    buffers: BufferText | None  # None without a buffer assignment
    others: tuple[tuple[str, int], ...] = ()  # further modules of the folder, with their bytes


class _Target(NamedTuple):
    name: str
    memory_bytes: int | None


def read_folder(folder: Path) -> Program:
    """The largest program of an `xla_dump_to` folder, or of those below it. Raises InputError for a
    folder without one."""
    found = sorted(folder.glob(f"*{ASSIGNMENT}")) or sorted(folder.rglob(f"*{ASSIGNMENT}"))
    sized = sorted(((_device_bytes(path), path) for path in found), key=lambda one: -one[0])
    if not sized:
        return read_hlo_file(_only_hlo(folder))
    others = tuple((_name(path), size) for size, path in sized[1:])
    return _of_assignment(sized[0][1])._replace(others=others)


def read_hlo_file(path: Path) -> Program:
    """The program of one file of a dump, with the assignment that stands beside it, if any."""
    beside = path.with_name(path.name.removesuffix(".txt") + ASSIGNMENT)
    if path.name.endswith(ASSIGNMENT) or beside.exists():
        return _of_assignment(path if path.name.endswith(ASSIGNMENT) else beside)
    return read_hlo(read_regular(path, MOST_TEXT, "replace"), _target(path))


def read_hlo(text: str, target: _Target = _Target("a program's text", None)) -> Program:
    """What the text of a program says without its buffer assignment."""
    try:
        module = parse(text)
    except ValueError as error:
        raise InputError(f"the HLO text cannot be read: {error}; give it whole") from error
    figures = read_program(text, None, None)
    notes = [_NO_HEAP]
    if "is_scheduled=true" not in text.partition("\n")[0]:
        notes.append(
            "it is not the compiled program, which the compiler will still change; of one from "
            "JAX's persistent compilation cache nothing else is dumped"
        )
    memory = _entry_memory(text, module)
    return Program(_measured(text, target, figures, memory, notes), module, None)


def _of_assignment(assignment: Path) -> Program:
    hlo, text = read_dumped(assignment)
    if not has_allocations(text):
        raise InputError(f"{assignment} has no allocation; give the whole folder of the dump")
    try:
        buffers = read_buffers(text)
    except ValueError as error:
        raise InputError(
            f"{assignment}: {error}; give the dump as the compiler wrote it"
        ) from error
    figures = read_program(hlo or "", text, None)
    notes = [] if hlo else [f"{assignment.name} has no program beside it: no roles, no lines"]
    if not buffers.schedule:
        notes.append(_NO_RANGES)
        figures = _without_attribution(figures)
    outside, heap = figures.assigned, sum(part.bytes for part in buffers.heap)
    assert outside is not None, "an assignment that can be read has these figures"
    target = _target(assignment)
    stem = _stem(assignment)
    refused = any(assignment.parent.glob(f"{stem}*{_REFUSED}"))
    measured = _measured(hlo or "", target, figures, outside.memory(heap), notes, refused=refused)
    return Program(measured, _parsed(hlo), buffers)


def _without_attribution(figures: ProgramFigures) -> ProgramFigures:
    return ProgramFigures(**{**vars(figures), "attribution": None})


def _parsed(hlo: str | None) -> Module | None:
    try:
        return parse(hlo) if hlo else None
    except ValueError:
        return None  # `read_program` says why


def _measured(
    hlo: str,
    target: _Target,
    figures: ProgramFigures,
    memory: Memory,
    notes: list[str],
    *,
    refused: bool = False,
) -> ReadProgram:
    devices = re.search(r"num_partitions=(\d+)", hlo.partition("\n")[0])
    return ReadProgram(
        platform=target.name,
        mesh={"devices": int(devices[1])} if devices else {},
        config={},
        memory=memory,
        xla_flops=None,
        bytes_accessed=None,
        seconds={},
        versions={},
        hlo=hlo,
        device_memory_bytes=target.memory_bytes,
        refused=refused,
        **{**vars(figures), "notes": (*notes, *figures.notes)},
    )


def _entry_memory(hlo: str, module: Module) -> Memory:
    """Arguments and results of the entry computation, without padding and without a heap."""
    entry = module.computations[module.entry]
    arguments = [one for one in entry.instructions.values() if one.opcode == "parameter"]
    shapes = entry.instructions[entry.root].shapes
    aliased = sum(shapes[at].bytes for at in aliased_outputs(hlo) if at < len(shapes))
    return Memory(
        argument_bytes=sum(one.result_bytes for one in arguments),
        output_bytes=sum(shape.bytes for shape in shapes),
        alias_bytes=aliased,
        temp_bytes=None,
        heap_bytes=None,
        constant_bytes=None,
        peak_bytes=None,
        generated_code_bytes=None,
        host_temp_bytes=0,
    )


def aliased_outputs(hlo: str) -> dict[int, int]:
    """The results of a program that take the memory of an argument, by number, and which."""
    header = re.search(r"input_output_alias=\{(.*?\)) \}", hlo.partition("\n")[0])
    entries = re.findall(r"\{(\d*)[\d, ]*\}: \((\d+),", header[1]) if header else []
    return {int(output or 0): int(argument) for output, argument in entries}


def arrays_made(module: Module) -> Iterator[tuple[str, int, Shape]]:
    """Each array that a computation makes outside of fusions: instruction, element, shape."""
    inside = {
        name
        for _, item in module.instructions()
        if item.opcode not in ("while", "conditional", "call")
        for name in item.called()
    }
    skipped = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant")
    for name in module.computations.keys() - inside:
        for item in module.computations[name].instructions.values():
            if item.opcode not in skipped:
                yield from ((item.name, at, shape) for at, shape in enumerate(item.shapes))


def _device_bytes(path: Path) -> int:
    sizes = _DEVICE_BYTES.findall(read_regular(path, MOST_TEXT, "replace"))
    return sum(int(size) for size, rest in sizes if _IN_DEVICE.match(rest))


def _only_hlo(folder: Path) -> Path:
    for pattern in ("*after_optimizations.txt", "*before_optimizations.txt", "*.hlo", "*.txt"):
        texts = [path for path in folder.rglob(pattern) if _begins_hlo(path)]
        if texts:
            return max(texts, key=lambda path: path.stat().st_size)
    binary = any(folder.rglob("*.pb"))
    what = "only binary protos" if binary else "no HLO text and no buffer assignment"
    raise InputError(
        f"{folder} holds {what}; dump with XLA_FLAGS=--xla_dump_to=FOLDER --xla_dump_hlo_as_text"
    )


def _begins_hlo(path: Path) -> bool:
    if not path.is_file():  # to open a pipe would wait
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        return BEGINS_HLO.match(file.read(200)) is not None


def _stem(path: Path) -> str:
    found = _MODULE.match(path.name)
    return found["stem"] if found else path.name.partition(".after")[0]


def _name(path: Path) -> str:
    found = _MODULE.match(path.name)
    return found["name"] if found else path.name.removesuffix(ASSIGNMENT)


def _target(path: Path) -> _Target:
    """What a module was compiled for, from the files beside it or from their names."""
    folder, stem = path.parent, _stem(path)
    for file in sorted(folder.glob(f"{stem}*target_arguments.txt")):
        return _tpu(read_regular(file, errors="replace"))
    for file in sorted(folder.glob(f"{stem}*gpu_target_config.pbtxt")):
        text = read_regular(file, errors="replace")
        name = re.search(r'device_description_str: "([^"]+)"', text)
        size = re.search(r"device_memory_size: (\d+)", text)
        return _Target(name[1] if name else "a GPU", int(size[1]) if size else None)
    if "_gpu_after" in path.name:
        chip = re.search(r"(sm_[\d.]+|gfx\w+)", path.name)
        return _Target(f"a GPU ({chip[1]})" if chip else "a GPU", None)
    # `cpu` is how `Measurement` tells the compiler whose figures mislead.
    return _Target("cpu", None) if "cpu_after" in path.name else _Target("a program's text", None)


def _tpu(text: str) -> _Target:
    version = re.search(r"version: TPU_VERSION_(\w+)", text)
    lite = " lite" if re.search(r'variant: "lite"', text) else ""
    target = _TPUS.get(f"{version[1]}{lite}" if version else "")
    if target is None:
        return _Target(f"a TPU ({version[1]})" if version else "a TPU", None)
    numbers = [int(number) for number in re.findall(r"[xyz]: (\d+)", text)]
    chips = [math.prod(pair) for pair in zip(numbers[:3], numbers[3:6], strict=False)]
    size = Platform("tpu", target).memory_bytes()
    return _Target(f"tpu:{target}:{'x'.join(map(str, chips))}" if chips else f"tpu:{target}", size)
