"""An explanation as tables for the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.columns import Column, Columns, number_columns, small_table, texts
from nnx_pipeline.lab._report.program_tables import memory_view
from nnx_pipeline.lab._report.tables import account_view
from nnx_pipeline.lab._report.view.buffers import buffer_rows, short_source
from nnx_pipeline.lab._report.view.figures import megabytes
from nnx_pipeline.lab._report.view.remarks import Remark, unread_lines, warnings
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.errors import printable
from nnx_pipeline.lab.explain._cures import Cure
from nnx_pipeline.lab.explain._texts import Message
from nnx_pipeline.lab.explain.explanation import Explanation

_SHOWN = 6  # messages, and other modules
_WHEN = {"compile": "while compiling", "run": "while running", "host": "on the host"}
_FIRST = {
    "compile": "No table of buffers is in the text. Put XLA_FLAGS=--xla_dump_to=FOLDER "
    "--xla_dump_hlo_as_text before the command, and explain FOLDER.",
    "run": "Not the program alone: look at what is alive (jax.live_arrays()), delete what is not "
    "needed, donate arguments, and see with nnx-pipeline memory what the step itself needs.",
    "host": "Smaller parts of the data or of the checkpoint at a time; on a cluster, more memory "
    "for the process. No change of the model or the mesh helps.",
}

_ADD_UP = (
    "Each gain is of one cure alone, at least, while all else stays; gains do not add up. Where it "
    "is 0.0, another moment of the program holds as much."
)
_OF_CPU = "No gain is promised of the CPU's compiler."
_NO_GAIN = (
    "No gain is known without the places of all buffers. A folder of XLA's xla_dump_to has them."
)


def explanation_view(found: Explanation, *, top: int) -> RenderableType:
    """All tables of an explanation, with `top` rows of the largest buffers."""
    parts: list[RenderableType] = [Text(found.source, style="bold")]
    program = found.program
    if message := found.main:
        parts += [*_messages(found.messages), *_sizes(message)]
        if message.buffers:
            parts.append(_listed("the largest buffers that the text lists", message.buffers, top))
        else:
            parts.append(Text(_FIRST[message.when]))
    elif program and program.attribution:
        parts.append(memory_view(_title(found), program.attribution, top=top))
        parts.append(account_view(program, advice={}))
    elif program:
        parts.append(Text(_title(found), style="bold"))
        if found.arrays:
            title = "the largest arrays that the program makes, not all at once"
            parts.append(_listed(title, found.arrays, top))
        parts.append(account_view(program, advice={}))
    parts += _others(found.others)
    parts += [_cures(found)] if found.cures else []
    if program and not found.messages:
        parts += texts(warnings(unread_lines([program])))
    else:
        parts += texts(warnings(found.notes))
    return Group(*parts)


def _title(found: Explanation) -> str:
    program = found.program
    assert program is not None, "a title is that of a program"
    return f"compiled for {program.platform}" if program.attribution else program.platform


def _messages(messages: Sequence[Message]) -> Iterator[Text]:
    for one in messages[:_SHOWN]:
        times = f", {one.times} times" if one.times > 1 else ""
        yield Text(f"line {one.line}, {_WHEN[one.when]}{times}: {one.what}")
    if len(messages) > _SHOWN:
        yield Text(f"{len(messages) - _SHOWN} more messages")


def _sizes(message: Message) -> Iterator[RenderableType]:
    if message.sizes:
        rows = [(name, megabytes(size)) for name, size in message.sizes.items()]
        yield small_table("what the text says", ("", "MB"), rows)
    needed, size = message.size("needed"), message.size("device has")
    if needed and size:
        over = f"{(needed - size) / 1e9:,.2f} GB too much ✗"
        text = f"{needed / 1e9:,.2f} of {size / 1e9:,.2f} GB: {over}"
        yield Text(text, style="bold red")


def _listed(title: str, rows: Sequence[Buffer], top: int) -> Columns:
    heads = [*number_columns("MB", "×"), Column("role"), Column("shape", 2)]
    table = Columns([*heads, Column("operation", 3), Column("source", 1)], title=title)
    shown = buffer_rows(rows)
    for row in shown[:top]:
        count = str(row.count) if row.count > 1 else ""
        table.add_row(megabytes(row.bytes), count, row.role, row.shape, row.operation, row.source)
    if rest := shown[top:]:
        count = str(sum(row.count for row in rest))
        table.add_row(megabytes(sum(row.bytes for row in rest)), count, "all others")
    return table


def _others(others: Sequence[tuple[str, int]]) -> Iterator[RenderableType]:
    if others:
        rows = [(name[:50], megabytes(size)) for name, size in others[:_SHOWN]]
        rest = others[_SHOWN:]
        more = [(f"{len(rest)} more", megabytes(sum(size for _, size in rest)))] if rest else []
        yield small_table("other modules", ("", "MB"), rows, more)


def _cures(found: Explanation) -> RenderableType:
    table = Table(title="what would make it smaller", title_justify="left", show_lines=True)
    table.add_column("MB held", justify="right", no_wrap=True)
    table.add_column("gain MB", justify="right", no_wrap=True)
    table.add_column("what was seen, and what to do", overflow="fold")
    for cure in found.cures:
        text = Text(f"{printable(cure.why)}\n", style="not bold")
        if cure.source:
            text.append(f"{short_source(cure.source)}\n", style="bold")
        text.append(f"→ {printable(cure.what)}", style="green")
        table.add_row(megabytes(cure.bytes), _gain(cure), text)
    return Group(table, Text(_of_gains(found), style="dim"))


def _gain(cure: Cure) -> str:
    return "unknown" if cure.gain_bytes is None else f"≥ {megabytes(cure.gain_bytes)}"


def _of_gains(found: Explanation) -> str:
    if any(cure.gain_bytes is not None for cure in found.cures):
        return _ADD_UP
    is_of_cpu = found.program is not None and found.program.is_of_cpu
    return _OF_CPU if is_of_cpu else _NO_GAIN


def cure_remarks(found: Explanation) -> list[Remark]:
    """The cures as lines of a page."""
    if not found.cures:
        return []
    lines = [
        f"{megabytes(cure.bytes)} MB, gain {_gain(cure)}: {cure.why}"
        f"{f', {short_source(cure.source)}' if cure.source else ''} → {cure.what}"
        for cure in found.cures
    ]
    return [Remark(line) for line in ("What would make it smaller:", *lines, _of_gains(found))]
