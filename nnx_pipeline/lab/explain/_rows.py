"""Rows for the arrays of a program whose places in memory are not known."""

from collections.abc import Iterable

from nnx_pipeline.lab._hlo.dataflow import Flow
from nnx_pipeline.lab._hlo.module import Module, Shape
from nnx_pipeline.lab.attribution._origins import Origins
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.attribution._roles import Roles

MOST = 200  # of the largest arrays


def rows_of_arrays(module: Module, arrays: Iterable[tuple[str, int, Shape]]) -> tuple[Buffer, ...]:
    """The largest of these arrays (instruction, element of its result, shape), with role and line;
    which of them are there at once is not known."""
    flow = Flow(module)
    origins = Origins(flow)
    roles = Roles(flow, origins)
    largest = sorted(arrays, key=lambda one: -one[2].bytes)[:MOST]
    rows = []
    for name, at, shape in largest:
        several = len(flow.instructions[name].shapes) > 1
        value = (name, (at,) if several else ())
        origin = origins.of(value)
        dims = ",".join(map(str, shape.dims))
        row = Buffer(
            name=f"{name}{{{at}}}" if several else name,
            bytes=shape.bytes,
            shape=f"{shape.dtype}[{dims}]",
            operation=origin.operation,
            source=origin.source,
            caller=origin.caller,
            role=roles.of(value, shape),
            first=0,
            last=0,
        )
        rows.append(row)
    return tuple(row for row in rows if row.bytes)
