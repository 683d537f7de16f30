"""A small table of figures that fits every screen, and remarks, as Rich shows them."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab._report.view.remarks import Remark, Tone

STYLES: dict[Tone, str] = {
    "plain": "",
    "strong": "bold",
    "warning": "yellow",
    "error": "red",
    "alarm": "bold red",
}


def small_table(title: str, heads: Sequence[str], *sections: Iterable[Sequence[str]]) -> Table:
    """A table of names and then figures, with a line between two sections of rows."""
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
    """Each remark as a line in the colour of its tone."""
    return [Text(remark.text, style=STYLES[remark.tone]) for remark in remarks]
