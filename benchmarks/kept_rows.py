"""Writes what a script measured: one line for each row, so that a new figure changes one line."""

import json
from pathlib import Path

from nnx_pipeline.lab._files import write_text


def write_rows(file: Path, found: object) -> None:
    """Writes JSON in which each list or object that holds no other is one line."""
    write_text(str(file), _written(found) + "\n")


def _written(value: object) -> str:
    if isinstance(value, dict) and _holds_others([*value.values()]):
        parts = [f"{json.dumps(str(key))}: {_written(one)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + "\n}"
    if isinstance(value, list) and _holds_others(value):
        return "[\n" + ",\n".join(map(_written, value)) + "\n]"
    return json.dumps(value, ensure_ascii=False)


def _holds_others(values: list[object]) -> bool:
    return any(isinstance(one, dict | list) for one in values)
