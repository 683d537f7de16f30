"""What `inspect`, `check` and `convert` do."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from linen_compat._cli import views
from linen_compat._cli.options import Source, Target
from linen_compat.checkpoints._check import (
    check_comparable,
    compare_with_maxtext,
    diagnose,
    read_everything,
)
from linen_compat.checkpoints._convert import From, To, plan
from linen_compat.checkpoints._named_config import read_config
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._streams import Mismatch
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._report.output import check_writable, emit_json, show
from nnx_pipeline.lab.errors import counted


@contextlib.contextmanager
def _command() -> Iterator[None]:
    """The CPU for JAX, and exit code 1 for a `Mismatch`: the arguments were fine."""
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without
    try:
        yield
    except Mismatch as error:
        raise Failed(str(error)) from error


@dataclass(frozen=True)
class Checks:
    read: bool
    numerics: bool
    allow_nan: bool


@_command()
def run_inspect(checkpoint: str, json_path: str | None) -> None:
    check_writable(json_path, "--json")
    found = inspect(checkpoint)
    layout = found.layout
    dtypes = Counter(leaf.dtype for leaf in found.parameters.values())
    kinds = ", ".join(f"{dtype} ({count} leaves)" for dtype, count in dtypes.items())
    dense = f" ({layout.num_dense_layers} of them dense)" if layout.num_dense_layers else ""
    show(
        f"{layout.format}: {counted(layout.num_layers, 'layer')}{dense}, "
        f"{counted(layout.stages, 'stage')}, {counted(layout.repeats, 'repeat')}; "
        f"{found.parameter_count:,} parameters in {kinds}; {_others(list(found.other))}",
        json_path=json_path,
    )
    show(views.inspection(found), json_path=json_path)
    emit_json(json_path, _as_json(found))


def _others(names: list[str]) -> str:
    """How many leaves are no parameters, and what they are, as the optimizer's state and a step."""
    roots = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
    count = "1 other leaf" if len(names) == 1 else f"{len(names)} other leaves"
    return f"{count} ({roots})" if names else "no other leaves"


def _as_json(found: Inspection) -> dict[str, object]:
    def leaves(tree: dict[str, object]) -> dict[str, object]:
        return {name: vars(leaf) for name, leaf in tree.items()}

    return {
        "schema": 1,
        "layout": found.layout.format,
        "num_layers": found.layout.num_layers,
        "stages": found.layout.stages,
        "repeats": found.layout.repeats,
        "parameter_count": found.parameter_count,
        "parameters": leaves({**found.parameters}),
        "other": leaves({**found.other}),
    }


@_command()
def run_check(checkpoint: str, config_name: str, checks: Checks, json_path: str | None) -> None:
    """Shows what a model would take from a checkpoint; raises Failed unless everything fits."""
    check_writable(json_path, "--json")
    config = read_config(config_name, checkpoint)
    found = diagnose(checkpoint, config)
    if checks.numerics:
        check_comparable(found)
    result: dict[str, Any] = {**found.to_json(), "read_bytes": None, "numerics": None}
    if found.format is not None:  # else the error says all there is to say
        show(views.diagnosis(found), json_path=json_path)
    problems = list(found.comparison.problems)
    if checks.read and not problems:
        try:
            with views.byte_bar("reading", None) as passed:
                result["read_bytes"] = read_everything(
                    found, config, allow_nan=checks.allow_nan, progress=passed
                )
        except Mismatch as error:
            problems.append(str(error))
    if checks.numerics and not problems:
        first_difference = compare_with_maxtext(checkpoint, config)
        result["numerics"] = vars(first_difference)
        show(views.first_difference(first_difference), json_path=json_path)
        if first_difference.place is not None:
            problems.append(f"{first_difference.place} differs from MaxText's mathematics")
    result = {**result, "problems": problems, "fits": not problems}
    emit_json(json_path, result)
    if problems:
        raise Failed(f"{checkpoint} does not fit {config_name}: {views.first_of(problems)}")


@_command()
def run_convert(source: Source, target: Target, *, keep_nan: bool) -> None:
    config = read_config(source.config_name) if source.config_name else None
    opened = From(source.checkpoint, source.source_format, config, source.parameters_only)
    prepared = plan(opened, To(**vars(target)))
    with views.byte_bar("converting", prepared.nbytes) as passed:
        prepared.run(allow_nan=keep_nan, progress=passed)
    show(views.conversion(prepared), json_path=None)
