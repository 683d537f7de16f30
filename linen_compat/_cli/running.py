"""What `inspect`, `check` and `convert` do, and what they print."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from rich import progress
from rich.console import Group, RenderableType
from rich.text import Text

from linen_compat.checkpoints import _check as checking
from linen_compat.checkpoints._check import diagnose, read_everything
from linen_compat.checkpoints._convert import Conversion, From, To, plan
from linen_compat.checkpoints._named_config import read_config
from linen_compat.formats._comparison import first_of
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._orbax.layouts import HUGGINGFACE
from linen_compat.formats._streams import Mismatch, Progress
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._report.columns import Column, Columns, number_columns
from nnx_pipeline.lab._report.output import Screen, check_writable, emit_json, show
from nnx_pipeline.lab.errors import counted, printable

_SHOWN = 40  # lines about single leaves


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
    contents = inspect(checkpoint)
    layout = contents.layout
    dtypes = Counter(leaf.dtype for leaf in contents.parameters.values())
    kinds = ", ".join(f"{dtype} ({count} leaves)" for dtype, count in dtypes.items())
    dense = f" ({layout.num_dense_layers} of them dense)" if layout.num_dense_layers else ""
    show(
        f"{layout.format}: {counted(layout.num_layers, 'layer')}{dense}, "
        f"{counted(layout.stages, 'stage')}, {counted(layout.repeats, 'repeat')}; "
        f"{contents.parameter_count:,} parameters in {kinds}; {_others(list(contents.other))}",
        json_path=json_path,
    )
    show(_inspection(contents), json_path=json_path)
    emit_json(json_path, _as_json(contents))


def _others(names: list[str]) -> str:
    """How many leaves are no parameters, and what they are, as the optimizer's state and a step."""
    roots = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
    count = "1 other leaf" if len(names) == 1 else f"{len(names)} other leaves"
    return f"{count} ({roots})" if names else "no other leaves"


def _as_json(contents: Inspection) -> dict[str, object]:
    return {
        "schema": 1,
        "layout": contents.layout.format,
        "num_layers": contents.layout.num_layers,
        "stages": contents.layout.stages,
        "repeats": contents.layout.repeats,
        "parameter_count": contents.parameter_count,
        "parameters": {name: vars(leaf) for name, leaf in contents.parameters.items()},
        "other": {name: vars(leaf) for name, leaf in contents.other.items()},
    }


@_command()
def run_check(checkpoint: str, config_name: str, checks: Checks, json_path: str | None) -> None:
    """Shows what a model would take from a checkpoint; raises Failed unless everything fits."""
    check_writable(json_path, "--json")
    config = read_config(config_name, checkpoint)
    diagnosis = diagnose(checkpoint, config)
    if checks.numerics:
        checking.check_comparable(diagnosis)
    result: dict[str, object] = {**diagnosis.to_json(), "read_bytes": None, "numerics": None}
    if diagnosis.format is not None:  # else the error says all there is to say
        show(_diagnosis(diagnosis), json_path=json_path)
    problems = list(diagnosis.comparison.problems)
    if checks.read and not problems:
        try:
            with _byte_bar("reading", None) as passed:
                result["read_bytes"] = read_everything(
                    diagnosis, config, allow_nan=checks.allow_nan, progress=passed
                )
        except Mismatch as error:
            problems.append(str(error))
    if checks.numerics and not problems:
        first_difference = checking.compare_with_maxtext(checkpoint, config)
        result["numerics"] = vars(first_difference)
        show(_first_difference(first_difference), json_path=json_path)
        if first_difference.place is not None:
            problems.append(f"{first_difference.place} differs from MaxText's mathematics")
    result = {**result, "problems": problems, "fits": not problems}
    emit_json(json_path, result)
    if problems:
        raise Failed(f"{checkpoint} does not fit {config_name}: {first_of(problems)}")


@_command()
def run_convert(source: From, target: To, config_name: str | None, *, keep_nan: bool) -> None:
    config = read_config(config_name) if config_name else None
    prepared = plan(replace(source, config=config), target)
    with _byte_bar("converting", prepared.nbytes) as passed:
        prepared.run(allow_nan=keep_nan, progress=passed)
    show(_conversion(prepared), json_path=None)


def _last_names(path: str) -> str:
    names = path.split("/")
    return path if len(names) <= 5 else "/".join(["…", *names[-4:]])


def _inspection(contents: Inspection) -> Columns:
    """A table of all parameters with shapes and dtypes; narrow screens get the end of names."""
    head = Column("parameter", shorter=_last_names)
    table = Columns([head, Column("shape", 1), Column("dtype", 2)])
    for name, leaf in contents.parameters.items():
        table.add_row(name, "×".join(map(str, leaf.shape)), leaf.dtype)
    return table


def _diagnosis(diagnosis: checking.Diagnosis) -> RenderableType:
    """A table that counts leaves by how they fit, and below it the leaves that do not."""
    result = diagnosis.comparison
    kinds = ("matched", "missing", "extra", "reshaped", "recast", "ignored")
    counts = {kind: len(getattr(result, kind)) for kind in kinds}
    counts["randomly initialised"] = len(result.fresh)
    head = (
        f"{diagnosis.format}: {counted(diagnosis.num_layers, 'layer')}, "
        f"{counted(diagnosis.stages, 'stage')}, {counted(diagnosis.repeats, 'repeat')}"
    )
    table = Columns([Column("leaves"), *number_columns("number")])
    for row in counts.items():
        table.add_row(*map(str, row))
    rows = [f"  recast: {d.leaf} from {d.found} to {d.expected}" for d in result.recast]
    rows += [f"  {problem}" for problem in result.problems]
    if len(rows) > _SHOWN:
        rows = [*rows[:_SHOWN], f"  and {len(rows) - _SHOWN} more; --json PATH has them all"]
    rows += [f"  {diagnosis.optimizer}"] if diagnosis.optimizer else []
    return Group(head, table, *map(_text, rows))


def _first_difference(result: checking.FirstDifference) -> str:
    """One line on how far the loaded model is from MaxText's mathematics."""
    if result.place is None:
        return f"numerics: every layer agrees to within {result.largest:.1e} of its largest value"
    return (
        f"numerics: {result.place} is off by {result.largest:.1e} of the largest value "
        f"(allowed: {checking.NUMERICS_TOLERANCE})"
    )


def _conversion(plan: Conversion) -> Text:
    """One line on what was written, and what was left behind."""
    what, layout = HUGGINGFACE, plan.layout
    if layout is not None:
        stages, repeats = counted(layout.stages, "stage"), counted(layout.repeats, "repeat")
        what = f"{layout.format}, {stages}, {repeats}"
    left = "; ".join(_named(*item) for item in plan.left_behind.items())
    rest = f"; left behind: {left}" if left else ""
    layers = plan.opened.source.num_layers
    return _text(f"{plan.destination}: {counted(layers, 'layer')} as {what}{rest}")


def _named(reason: str, names: tuple[str, ...], shown: int = 5) -> str:
    """Names in one line, and why they are named; of more than `shown` the first three."""
    if len(names) <= shown:
        return f"{', '.join(names)}, {reason}"
    return f"{', '.join(names[:3])} … ({len(names)} in all), {reason}"


def _text(words: str) -> Text:
    """A line, in which no name begins another one."""
    return Text(printable(words))


@contextlib.contextmanager
def _byte_bar(title: str, total: int | None) -> Iterator[Progress]:
    """Shows a progress bar of bytes on standard error, and yields the function that moves it."""
    done = progress.FileSizeColumn() if total is None else progress.DownloadColumn()
    columns = (progress.TextColumn(title), progress.BarColumn(), done)
    left, screen = progress.TimeRemainingColumn(), Screen(stderr=True)
    with progress.Progress(*columns, left, console=screen) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes)
