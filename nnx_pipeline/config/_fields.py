"""What all configs check of their fields, and the largest sizes, far above those of all models."""

import dataclasses
from typing import Any, Literal, get_args, get_origin

from nnx_pipeline.lab.errors import one_of

MOST_LAYERS = 10_000  # what is done layer by layer then takes seconds
MOST_WIDTH = 2**24  # of one axis of a weight
MOST_PARAMETERS = 10**13  # of a model
MOST_TOKENS = 2**30  # of a batch
MOST_MICROBATCHES = 2**20  # a schedule is written out in tables of them
MOST_INTERVAL = 2**16  # steps whose losses are kept
MOST_PARTS = 1024  # each part of a batch is traced apart


def check_choices(config: Any) -> None:
    """Raises InputError unless each field with choices (bool, Literal, or None) has one of them."""
    for field in dataclasses.fields(config):
        if choices := _choices(field.type):
            one_of(field.name, getattr(config, field.name), choices)


def _choices(hint: object) -> tuple[object, ...]:
    if hint is bool:
        return True, False
    if get_origin(hint) is Literal:
        return get_args(hint)
    literal = next((part for part in get_args(hint) if get_origin(part) is Literal), None)
    return () if literal is None else (None, *get_args(literal))
