"""Writes into the text of a compiled program what only its binary form has.

- Tables of integers: the text has `{...}` in the place of every constant of more than ten entries.
  Tables of which a loop reads one entry in each trip choose branches (`_hlo.loops`).
- What XLA's model says of an asynchronous reduce-scatter or all-to-all (`_timing.xla_model`): it
  stands in a computation that the text leaves out.
"""

import functools
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from nnx_pipeline.lab._hlo.loops import MOST_TRIPS

_LEFT_OUT = re.compile(
    r"^(\s*(?:ROOT )?%?([\w.$-]+) = (?:pred|[su](?:8|16|32|64))\[(\d+)\]\S* constant\()\{\.\.\.\}",
    re.MULTILINE,
)
_NO_COSTS = re.compile(
    r'^(\s*(?:ROOT )?%?([\w.$-]+) = [^\n]*-start\([^\n]*?)"reification_cost":\[\]', re.MULTILINE
)
_COSTS = re.compile(r'"reification_cost":\[\{[^\]]*\]')
# The fields of a literal that hold integers: their number and type, and how bytes are to be read.
_INTEGERS: dict[str, tuple[int, str, str]] = {
    "preds": (2, "BOOL", ""),
    "u8s": (3, "BYTES", "u1"),
    "s32s": (4, "INT32", ""),
    "s64s": (5, "INT64", ""),
    "u32s": (6, "UINT32", ""),
    "u64s": (7, "UINT64", ""),
    "s8s": (15, "BYTES", "i1"),
    "u16s": (16, "BYTES", "<u2"),
    "s16s": (17, "BYTES", "<i2"),
}
# The parts of XLA's `hlo.proto` and `xla_data.proto` that are read: for each message its fields,
# with their number and the message, or the type of the values, that they hold.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Module": {"computations": (3, "Computation")},
    "Computation": {"instructions": (2, "Instruction"), "id": (5, "INT64")},
    "Instruction": {
        "name": (1, "STRING"),
        "opcode": (2, "STRING"),
        "literal": (8, "Literal"),
        "called": (38, "INT64"),
        "config": (43, "BYTES"),
    },
    "Literal": {name: (number, type_name) for name, (number, type_name, _) in _INTEGERS.items()},
}


def with_tables(text: str, compiled: jax.stages.Compiled) -> str:
    """The text of a program with its tables of integers, where it has branches to choose. A table
    has one axis, and no more entries than `MOST_TRIPS`. The text stays as it is where the runtime
    does not give the program in its binary form."""
    wanted = {one[2] for one in _LEFT_OUT.finditer(text) if int(one[3]) <= MOST_TRIPS}
    if " conditional(" not in text or not wanted:
        return text
    # Without a binary form a note says how branches are counted.
    tables: dict[str, str] = {}
    for module in _modules(compiled):
        tables |= _tables(module, wanted)
    return _LEFT_OUT.sub(lambda found: found[1] + tables.get(found[2], "{...}"), text)


def with_costs(text: str, compiled: jax.stages.Compiled) -> str:
    """The text of a program with the list of costs in each start whose text has an empty one."""
    if not _NO_COSTS.search(text):
        return text
    # Without a binary form the rates of the links count, and a line says so.
    costs = {name: cost for one in _modules(compiled) for name, cost in _costs_of_starts(one)}
    return _NO_COSTS.sub(
        lambda found: found[1] + costs.get(found[2], '"reification_cost":[]'), text
    )


def _modules(compiled: jax.stages.Compiled) -> list[Any]:
    """The program in its binary form; empty where the runtime does not give it."""
    executable: Any = compiled.runtime_executable()
    try:
        modules = [] if executable is None else executable.hlo_modules()
    except jax.errors.JaxRuntimeError:
        return []
    return [_module_type().FromString(one.as_serialized_hlo_module_proto()) for one in modules]


def _costs_of_starts(module: Any) -> Iterator[tuple[str, str]]:
    """Each asynchronous start with the costs of what it runs, as they are written."""
    inside = {one.id: one.instructions for one in module.computations}
    for one in module.computations:
        for start in one.instructions:
            for number in start.called if start.opcode == "async-start" else ():
                for item in inside.get(number, ()):
                    if found := _COSTS.search(item.config.decode(errors="replace")):
                        yield start.name, found.group()


def _tables(module: Any, wanted: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            for kind, (_, _, read_as) in _INTEGERS.items() if instruction.name in wanted else ():
                entries = getattr(instruction.literal, kind)
                if entries:
                    numbers = np.frombuffer(entries, read_as) if read_as else entries
                    found[instruction.name] = f"{{{', '.join(str(int(one)) for one in numbers)}}}"
    return found


@functools.cache
def _module_type() -> Any:
    """The message of a whole module with the fields of `_MESSAGES`; protobuf skips all others."""
    kinds = descriptor_pb2.FieldDescriptorProto
    package = "nnx_pipeline.hlo"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, type_name) in fields.items():
            single = type_name in ("STRING", "BYTES") or name in ("literal", "id")
            label = kinds.LABEL_OPTIONAL if single else kinds.LABEL_REPEATED
            field = described.field.add(name=name, number=number, label=label)
            if type_name in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{type_name}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{type_name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Module"))
