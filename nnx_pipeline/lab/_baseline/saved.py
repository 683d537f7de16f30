"""Reads a measurement from what `nnx-pipeline memory --json` or `measure --json` wrote."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from nnx_pipeline.lab._files import read_regular
from nnx_pipeline.lab._timing.result import Time
from nnx_pipeline.lab.attribution._result import Attribution
from nnx_pipeline.lab.attribution.account import Memory
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.errors import InputError

_WRITE = "write one by nnx-pipeline memory SUBJECT --json FILE"


def saved_measurements(path: str) -> list[Measurement]:
    """The programs in a file: one, or one for each kind of matrix products.

    Raises InputError for a file that these commands have not written.
    """
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); {_WRITE}") from error
    return measurements_of(document, path)


def measurements_of(document: Any, named: str) -> list[Measurement]:
    """The programs in the JSON of `memory` or `measure`; raises InputError for another one."""
    try:
        first = _measurement(document)
        other = document.get("other_gemm")
        return [first, *([_measurement(other)] if other else [])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{named} is no result of measure or memory ({error!r}); {_WRITE}"
        ) from error


def _measurement(value: Mapping[str, Any]) -> Measurement:
    if value["schema"] != 1:
        raise ValueError(f"schema {value['schema']!r}")
    names = {field.name for field in dataclasses.fields(Measurement)}
    # The floor is not read: no comparison has it.
    kept = {name: item for name, item in value.items() if name in names and name != "floor"}
    kept["memory"] = _fields(Memory, value["memory"])
    for name, size in kept["memory"].items():
        if not isinstance(size, int | None):
            raise TypeError(f"{name}: {size!r}")
    kept["kept_fingerprint"] = value["fingerprint"]
    kept["time"] = None
    if value["time"].get("basis"):
        kept["time"] = {**_fields(Time, value["time"]), "rows": value.get("time_by_line") or ()}
    if buffers := value.get("buffers"):
        kept["attribution"] = _fields(Attribution, buffers)
    return Measurement.from_cache({**kept, "hlo": ""}, None)


def _fields(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field.name: value[field.name] for field in dataclasses.fields(kind) if field.name in value
    }
