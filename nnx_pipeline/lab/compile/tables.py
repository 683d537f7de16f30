"""Writes out the tables of integers in the text of a compiled program.

The text of a program has `{...}` in the place of every constant of more than ten entries. Those of
which a loop reads one entry in each trip choose branches (see `lab.hlo.branches`), so that without
them nothing would tell how often each branch runs. The program in its binary form has them.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_LEFT_OUT = re.compile(
    r"^(\s*(?:ROOT )?%?([\w.$-]+) = (?:pred|s32|u32)\[\d+\]\S* constant\()\{\.\.\.\}", re.MULTILINE
)
_INTEGERS = {"preds": (2, "BOOL"), "s32s": (4, "INT32"), "u32s": (6, "UINT32")}
# The parts of XLA's `hlo.proto` and `xla_data.proto` that are read: for each message its fields,
# with their number and the message, or the type of the values, that they hold.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Module": {"computations": (3, "Computation")},
    "Computation": {"instructions": (2, "Instruction")},
    "Instruction": {"name": (1, "STRING"), "literal": (8, "Literal")},
    "Literal": _INTEGERS,
}


def with_tables(text: str, compiled: jax.stages.Compiled) -> str:
    """The text of a program with its tables of integers, where it has branches to choose.

    - `text`: `compiled.as_text()`.
    - `compiled`: the program.
    """
    executable: Any = compiled.runtime_executable()
    if " conditional(" not in text or not _LEFT_OUT.search(text) or executable is None:
        return text
    tables: dict[str, str] = {}
    for module in executable.hlo_modules():
        tables |= _tables(module.as_serialized_hlo_module_proto())

    def entries(found: re.Match[str]) -> str:
        return found.group(1) + tables.get(found.group(2), "{...}")

    return _LEFT_OUT.sub(entries, text)


def _tables(module: bytes) -> dict[str, str]:
    """The entries of each constant that holds integers, as its program's text would show them."""
    found: dict[str, str] = {}
    for computation in _module_type().FromString(module).computations:
        for instruction in computation.instructions:
            for kind in _INTEGERS if instruction.HasField("literal") else ():
                entries = getattr(instruction.literal, kind)
                if entries:
                    found[instruction.name] = f"{{{', '.join(str(int(one)) for one in entries)}}}"
    return found


@functools.cache
def _module_type() -> Any:
    """The message of a whole module with the fields of `_MESSAGES`; protobuf skips all others."""
    kinds = descriptor_pb2.FieldDescriptorProto
    package = "nnx_pipeline.hlo"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, held) in fields.items():
            single = held == "STRING" or name == "literal"
            label = kinds.LABEL_OPTIONAL if single else kinds.LABEL_REPEATED
            field = described.field.add(name=name, number=number, label=label)
            if held in _MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".{package}.{held}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{held}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Module"))
