"""What `inspect`, `convert` and `formats` do, and what they print; `convert` imports no JAX."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rich import progress
from rich.console import RenderableType
from rich.text import Text

from linen_compat.checkpoints._convert import Conversion, From, To, plan
from linen_compat.checkpoints._named_config import read_config
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._orbax.layouts import HUGGINGFACE
from linen_compat.formats._streams import Mismatch, Progress
from linen_compat.formats.huggingface._architectures import ARCHITECTURES
from linen_compat.maxtext._families import BLOCKS, OTHER_BLOCKS
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._report.output import Screen, check_writable, emit_json, show
from nnx_pipeline.lab.errors import counted, printable


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Exit code 1 for a `Mismatch`: the arguments were fine."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without
    try:
        yield
    except Mismatch as error:
        raise Failed(str(error)) from error


@command()
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


@command()
def run_formats(json_path: str | None) -> None:
    check_writable(json_path, "--json")
    for one in ARCHITECTURES.values():
        has = ", ".join(one.features) or "a plain decoder"
        show(f"{one.name} ({one.model_type}): {has}", json_path=json_path)
    known = [
        {"class": one.name, "model_type": one.model_type, "has": [*one.features]}
        for one in ARCHITECTURES.values()
    ]
    for name, block in BLOCKS.items():
        show(f"MaxText {name}: {block.has or 'a plain decoder'}", json_path=json_path)
    for name, reason in OTHER_BLOCKS.items():
        show(f"MaxText {name}: refused, {reason}", json_path=json_path)
    blocks = [{"decoder_block": name, "has": block.has} for name, block in BLOCKS.items()]
    refused = [{"decoder_block": name, "why": reason} for name, reason in OTHER_BLOCKS.items()]
    found = {"huggingface": known, "maxtext": blocks, "refused": refused}
    emit_json(json_path, {"schema": 1, **found})


@command()
def run_convert(source: From, target: To, config_name: str | None, *, keep_nan: bool) -> None:
    config = read_config(config_name) if config_name else None
    prepared = plan(replace(source, config=config), target)
    with byte_bar("converting", prepared.nbytes) as passed:
        prepared.run(allow_nan=keep_nan, progress=passed)
    show(_conversion(prepared), json_path=None)


def _last_names(path: str) -> str:
    names = path.split("/")
    return path if len(names) <= 5 else "/".join(["…", *names[-4:]])


def _inspection(contents: Inspection) -> RenderableType:
    """A table of all parameters with shapes and dtypes; narrow screens get the end of names."""
    from nnx_pipeline.lab._report.columns import Column, Columns  # which imports JAX

    head = Column("parameter", shorter=_last_names)
    table = Columns([head, Column("shape", 1), Column("dtype", 2)])
    for name, leaf in contents.parameters.items():
        table.add_row(name, "×".join(map(str, leaf.shape)), leaf.dtype)
    return table


def _conversion(plan: Conversion) -> Text:
    """One line on what was written, and what was left behind."""
    what, layout = HUGGINGFACE, plan.layout
    if layout is not None:
        stages, repeats = counted(layout.stages, "stage"), counted(layout.repeats, "repeat")
        what = f"{layout.format}, {stages}, {repeats}"
    left = "; ".join(_named(*item) for item in plan.left_behind.items())
    rest = f"; left behind: {left}" if left else ""
    layers = plan.opened.source.num_layers
    return text_of(f"{plan.destination}: {counted(layers, 'layer')} as {what}{rest}")


def _named(reason: str, names: tuple[str, ...], shown: int = 5) -> str:
    """Names in one line, and why they are named; of more than `shown` the first three."""
    if len(names) <= shown:
        return f"{', '.join(names)}, {reason}"
    return f"{', '.join(names[:3])} … ({len(names)} in all), {reason}"


def text_of(words: str) -> Text:
    """A line, in which no name begins another one."""
    return Text(printable(words))


@contextlib.contextmanager
def byte_bar(title: str, total: int | None) -> Iterator[Progress]:
    """Shows a progress bar of bytes on standard error, and yields the function that moves it."""
    done = progress.FileSizeColumn() if total is None else progress.DownloadColumn()
    columns = (progress.TextColumn(title), progress.BarColumn(), done)
    left, screen = progress.TimeRemainingColumn(), Screen(stderr=True)
    with progress.Progress(*columns, left, console=screen) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name, nbytes: bar.update(task, advance=nbytes)
