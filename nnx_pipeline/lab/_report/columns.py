"""Tables for the terminal, which leave out whole columns on a narrow screen and cut no words."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.view.remarks import Remark, Tone
from nnx_pipeline.lab.errors import printable

Rows = list[list[str] | None]  # the cells of each row; None is a line between two sections
SHORTEST_TEXT = 8  # letters of what is folded
SHORTEST_PROSE = 28  # letters; prose in a narrower column is no longer read with ease


@dataclass(frozen=True)
class Column:
    """On a narrow screen the column with the largest `left_out` goes first; one with 0 stays.

    A column is made `shorter` before it is left out, and one that stays before any other is.
    """

    name: str
    left_out: int = 0
    is_number: bool = False
    is_prose: bool = False
    shorter: Callable[[str], str] | None = None


def number_columns(*names: str) -> list[Column]:
    return [Column(name, is_number=True) for name in names]


@dataclass
class Columns:
    """A table of text that fits any screen; the line below it names the columns left out."""

    columns: Sequence[Column]
    title: str = ""
    is_bare: bool = False
    rows: Rows = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        missing = len(self.columns) - len(cells)
        self.rows.append([*map(printable, cells), *[""] * missing])

    def add_section(self) -> None:
        self.rows.append(None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, rows, shortened = list(range(len(self.columns))), self.rows, set[int]()
        # A table is never measured to be wider than what it may take.
        wide = options.update(max_width=10_000)
        is_whole = True
        while Measurement.get(console, wide, self._table(shown, rows)).minimum > options.max_width:
            at = self._next(shown, shortened)
            if at is None:
                is_whole = False
                break
            if (shorter := self.columns[at].shorter) and at not in shortened:
                rows = [row and [*row[:at], shorter(row[at]), *row[at + 1 :]] for row in rows]
                shortened.add(at)
            else:
                shown.remove(at)
        if self.title:
            yield Text(self.title, style="italic")
        yield self._table(shown, rows, is_whole)
        if missing := [at for at in range(len(self.columns)) if at not in shown]:
            names = ", ".join(self.columns[at].name for at in missing)
            yield Text(f"left out at {options.max_width} columns: {names}", style="dim")

    def _next(self, shown: Sequence[int], shortened: Collection[int]) -> int | None:
        for at in shown:
            if self.columns[at].shorter and not self.columns[at].left_out and at not in shortened:
                return at
        order = [at for at in shown if self.columns[at].left_out]
        return max(order, key=lambda at: self.columns[at].left_out, default=None)

    def _table(self, shown: Sequence[int], rows: Rows, is_whole: bool = True) -> Table:
        """These columns; unless `is_whole`, long texts are folded, since nothing else helps."""
        table = Table(
            box=box.SIMPLE_HEAD if self.is_bare else box.HEAVY_HEAD,
            padding=(0, 1, 0, 0) if self.is_bare else (0, 1),
            pad_edge=not self.is_bare,
        )
        for at in shown:
            column = self.columns[at]
            cells = [column.name, *(row[at] for row in rows if row is not None)]
            whole = max(cell_len(line) for cell in cells for line in cell.split("\n"))
            most = SHORTEST_PROSE if column.is_prose else whole if is_whole else SHORTEST_TEXT
            table.add_column(
                column.name,
                justify="right" if column.is_number else "left",
                overflow="fold",
                min_width=whole if column.is_number or whole < most else most,
            )
        for row in rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*(row[at] for at in shown))
        return table


STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "warning": "yellow",
    "error": "red",
    "alarm": "bold red",
}


def small_table(title: str, heads: Sequence[str], *sections: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(heads))
    name, *figures = heads
    table.add_column(name, no_wrap=True)
    for head in figures:
        table.add_column(head, justify="right", no_wrap=True)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def texts(remarks: Iterable[Remark]) -> list[Text]:
    return [Text(remark.text, style=STYLES[remark.tone]) for remark in remarks]
