"""Explains a text, a dump or a program's text that others made."""

import dataclasses
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from nnx_pipeline.lab._files import local, read_regular
from nnx_pipeline.lab._hlo.buffers import read_buffers
from nnx_pipeline.lab._hlo.module import parse
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.attribution.account import Memory
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.explain._cures import Cure, cures_of, promises_of
from nnx_pipeline.lab.explain._gains import Given, Placed
from nnx_pipeline.lab.explain._program import (
    BEGINS_HLO,
    Program,
    ReadProgram,
    arrays_made,
    read_folder,
    read_hlo,
    read_hlo_file,
)
from nnx_pipeline.lab.explain._rows import rows_of_arrays
from nnx_pipeline.lab.explain._texts import Message, read_messages

MOST_BYTES = 2**29  # of a text that is read whole
_NOTHING = (
    "{}: nothing here is known: no out-of-memory message, no HLO text, no buffer assignment; give "
    "the text from RESOURCE_EXHAUSTED on, or an xla_dump_to folder"
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known of a program that others compiled.

    - `source`: the file or folder, `-` for standard input.
    - `messages`: what an out-of-memory text says, in its order; () for a dump or a program.
    - `program`: the program with its account and its buffers; None where the text lists none.
    - `arrays`: of a program without a buffer assignment, the arrays that it makes, largest first.
    - `cures`: what would make it smaller, the largest gain first.
    - `others`: further modules of a dump and their bytes of device memory, largest first.
    - `notes`: what is not known, and lines that were not understood.
    """

    source: str
    messages: tuple[Message, ...] = ()
    program: ReadProgram | None = None
    arrays: tuple[Any, ...] = ()
    cures: tuple[Cure, ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Message | None:
        """The message that says most: one with a table of buffers, else one of a device."""
        return max(self.messages, key=_weight, default=None)

    def to_json(self) -> dict[str, Any]:
        """The explanation as `explain --json` writes it."""
        program = self.program
        return {
            "schema": 1,
            "source": self.source,
            "messages": [dataclasses.asdict(one) for one in self.messages],
            "program": program
            and {
                **program.to_json(),
                "buffers": program.attribution and program.attribution.to_json(),
            },
            "arrays": [dataclasses.asdict(one) for one in self.arrays],
            "cures": [dataclasses.asdict(one) for one in self.cures],
            "other_modules": [{"name": name, "bytes": size} for name, size in self.others],
            "notes": list(self.notes),
        }


def _weight(message: Message) -> tuple[object, ...]:
    says_why = "needed" in message.sizes or "TensorCore" in message.sizes
    is_host = message.when == "host"
    return len(message.buffers), says_why, not is_host, "asked for" in message.sizes


def explain(path: str | os.PathLike[str]) -> Explanation:
    """Says what a program that others compiled holds in memory, and what would make it smaller.

    - `path`: a text with an out-of-memory message, an `xla_dump_to` folder, or an HLO text.

    Raises InputError where nothing in it is known.
    """
    source = os.fspath(path)
    place = local(source)
    if place.is_dir():
        return _of_program(source, read_folder(place))
    try:
        text = read_regular(place, MOST_BYTES, "replace")
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}; name another") from error
    is_part_of_dump = BEGINS_HLO.match(text) or text.startswith("BufferAssignment:")
    if is_part_of_dump:
        return _of_program(source, read_hlo_file(place))
    return explain_text(text, source)


def explain_text(text: str, source: str = "the text") -> Explanation:
    """As `explain`, of a text itself.

    - `text`: an out-of-memory message with whatever is around it, or an HLO text.
    - `source`: what the text is called.
    """
    if BEGINS_HLO.match(text):
        return _of_program(source, read_hlo(text))
    messages, unread = read_messages(text)
    if not messages:
        what = f"{source}: {unread[0]}" if unread else ""
        raise InputError(_NOTHING.format(what or source))
    found = Explanation(source=source, messages=tuple(messages), notes=tuple(unread))
    return _of_messages(found)


def _of_program(source: str, program: Program) -> Explanation:
    figures, placed = program.figures, None
    rows: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()
    if figures.attribution:
        rows = figures.attribution.buffers
    elif program.module and program.buffers is None:
        arrays = rows = rows_of_arrays(program.module, arrays_made(program.module))
    if program.module and program.buffers and program.buffers.schedule:
        placed = Placed(program.module, program.buffers, figures.hlo)
    is_tpu = figures.platform.startswith(("tpu", "a TPU"))
    arguments = figures.memory.argument_bytes
    cures = cures_of(rows, placed, arguments=arguments, is_tpu=is_tpu)
    if figures.is_of_cpu:  # what a cure does to a program of the CPU's compiler tells nothing
        cures = tuple(dataclasses.replace(cure, gain_bytes=None) for cure in cures)
    return Explanation(
        source=source,
        program=figures,
        arrays=arrays,
        cures=cures,
        others=program.others,
        notes=figures.notes,
    )


def promised(measured: Measurement) -> dict[str, int]:
    """The bytes that changes of a compiled program gain at least, by the kind of the change, as far
    as the places of its buffers tell; nothing for a program of the CPU's compiler."""
    rows, text = measured.attribution, measured.buffer_assignment
    if rows is None or text is None or measured.is_of_cpu:
        return {}
    placed = Placed(parse(measured.hlo), read_buffers(text), measured.hlo)
    return promises_of(rows.buffers, placed) if placed.buffers.schedule else {}


def donations_of(measured: Measurement) -> tuple[list[Given], int]:
    """The arguments of a compiled program that could be donated, and what its account would lose at
    least; none and 0 where the places of its buffers are not known, as from a cache.

    Of an argument with several arrays half of them or more must fit: else it comes back as another.
    """
    text = measured.buffer_assignment
    if text is None:
        return [], 0
    placed = Placed(parse(measured.hlo), read_buffers(text), measured.hlo)
    if not placed.buffers.schedule:
        return [], 0
    every, fit = (
        Counter(root_of(one) for one in names)
        for names in (
            [argument.op_name for argument in placed.arguments],
            [given.name for given in placed.donations()[0]],
        )
    )
    names = [one.op_name for one in placed.arguments]
    return placed.donations([one for one in names if 2 * fit[root_of(one)] >= every[root_of(one)]])


def root_of(name: str) -> str:
    """The argument that an array is part of: `model` for `model.layers[0]['w']`."""
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def _of_messages(found: Explanation) -> Explanation:
    """With the program as far as the table of the main message shows it."""
    message = found.main
    if message is None or not message.buffers:
        return found
    arguments = message.size("arguments") or 0
    memory = Memory(
        argument_bytes=arguments,
        output_bytes=message.size("outputs") or 0,
        alias_bytes=message.size("outputs in arguments") or 0,
        temp_bytes=None,
        heap_bytes=message.size("heap"),
        constant_bytes=message.size("constants"),
        peak_bytes=None,
        generated_code_bytes=None,
        host_temp_bytes=0,
    )
    listed = Attribution(
        heap_bytes=sum(row.bytes for row in message.buffers),
        temp_bytes=None,
        peak_position=0,
        buffers=message.buffers,
        other=(),
        timeline=(),
    )
    program = ReadProgram(
        platform="as in the text",
        mesh={},
        config={},
        memory=memory,
        flops=None,
        xla_flops=None,
        bytes_accessed=None,
        collectives={},
        seconds={},
        versions={},
        hlo="",
        attribution=listed,
        device_memory_bytes=message.size("device has", "of the allocator"),
        refused=message.when == "compile",
    )
    cures = cures_of(message.buffers, None, arguments=arguments)
    return dataclasses.replace(found, program=program, cures=cures)
