"""The profile for pprof: decoded again by protobuf, by the names of pprof's own format."""

import dataclasses
import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from page_examples import attribution

from nnx_pipeline.lab._report.pprof import pprof_profile

# The messages of pprof's `profile.proto`, as far as they are read here: number, type, repeated.
MESSAGES = {
    "Profile": {
        "sample_type": (1, "ValueType", True),
        "sample": (2, "Sample", True),
        "location": (4, "Location", True),
        "function": (5, "Function", True),
        "string_table": (6, "STRING", True),
        "comment": (13, "INT64", True),
    },
    "ValueType": {"type": (1, "INT64", False), "unit": (2, "INT64", False)},
    "Sample": {
        "location_id": (1, "UINT64", True),
        "value": (2, "INT64", True),
        "label": (3, "Label", True),
    },
    "Label": {"key": (1, "INT64", False), "str": (2, "INT64", False)},
    "Location": {"id": (1, "UINT64", False), "line": (4, "Line", True)},
    "Line": {"function_id": (1, "UINT64", False), "line": (2, "INT64", False)},
    "Function": {
        "id": (1, "UINT64", False),
        "name": (2, "INT64", False),
        "system_name": (3, "INT64", False),
        "filename": (4, "INT64", False),
    },
}


def decoded(data: bytes) -> Any:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax="proto3")
    for message, fields in MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, repeated) in fields.items():
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            field = described.field.add(name=name, number=number, label=label)
            if kind in MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".p.{kind}"
            else:
                field.type = kinds.Type.Value(f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Profile"))()
    found.ParseFromString(gzip.decompress(data))
    return found


def test_a_profile_has_the_bytes_and_call_stacks_of_the_heap() -> None:
    heap = attribution()
    profile = decoded(pprof_profile(heap, "a program"))
    texts, number = list(profile.string_table), {one.id: one for one in profile.location}
    functions = {one.id: one for one in profile.function}
    assert texts[0] == ""
    assert len(set(texts)) == len(texts)
    (kind,) = profile.sample_type
    assert (texts[kind.type], texts[kind.unit]) == ("heap", "bytes")
    assert [texts[at] for at in profile.comment] == ["a program"]
    found: Counter[Any] = Counter()
    for sample in profile.sample:
        stack = []
        for at in sample.location_id:
            (line,) = number[at].line
            function = functions[line.function_id]
            assert function.system_name == function.name
            stack.append((texts[function.filename], line.line, texts[function.name]))
        labels = {texts[label.key]: texts[label.str] for label in sample.label}
        found[tuple(stack), labels["role"], labels.get("shape", "")] += sum(sample.value)
    expected: Counter[Any] = Counter()
    for buffer in heap.buffers:
        calls = tuple((one.file, one.line, one.function) for one in heap.stack(buffer.call))
        expected[calls or (("", 0, f"({buffer.role})"),), buffer.role, buffer.shape] += buffer.bytes
    assert found == expected
    assert found.total() == heap.heap_bytes


def test_large_and_negative_numbers() -> None:
    heap = attribution()
    sizes = (0, 127, 128, 2**40 + 1, -5)
    rows = [dataclasses.replace(heap.buffers[0], bytes=size) for size in sizes]
    profile = decoded(pprof_profile(dataclasses.replace(heap, buffers=tuple(rows)), "é"))
    assert tuple(sample.value[0] for sample in profile.sample) == sizes
    assert profile.string_table[profile.comment[0]] == "é"


@pytest.mark.slow
def test_memory_writes_a_profile(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "heap.pb.gz"
    ended = run(
        *("memory", "tiny", "--set", "model.num_layers=1", "--platform", "cpu"),
        *("--pprof", str(path), "--json", "-"),
    )
    assert ended.code == 0, ended.err
    profile = decoded(path.read_bytes())
    heap = ended.json["memory"]["heap_bytes"]
    assert sum(sample.value[0] for sample in profile.sample) == heap
    names = {profile.string_table[one.name] for one in profile.function}
    assert "train_step" in names
    assert str(path) not in " ".join(profile.string_table)
