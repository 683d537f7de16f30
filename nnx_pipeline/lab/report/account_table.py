"""The account of a device's memory as a table, and what is to be known of its figures."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.account import ROWS
from nnx_pipeline.lab.attribution_view import megabytes
from nnx_pipeline.lab.compile import Measurement

TOTAL = "the account: what must fit"
OTHER_ROWS = (  # figures of `Memory` that are no part of the account
    ("temp", "temp_bytes"),
    ("peak", "peak_bytes"),
    ("program code", "generated_code_bytes"),
    ("host temp", "host_temp_bytes"),
    ("host arguments", "host_argument_bytes"),
    ("host outputs", "host_output_bytes"),
)


def account_rows(measurement: Measurement) -> list[tuple[str, int | None]]:
    """The parts of the account, their sum last; what starts with spaces is of the row above it."""
    account = measurement.account
    rows: list[tuple[str, int | None]] = []
    for label, size in account.rows().items():
        rows.append((label, size))
        if label == ROWS["output_bytes"] and account.scratch_bytes:
            rows.append(("  of these, temporaries before the result", account.scratch_bytes))
    return [*rows, (TOTAL, account.total_bytes)]


def account_table(measurement: Measurement) -> Table:
    """What the program holds in the memory of a device."""
    table = Table(title="memory per device", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("MB", justify="right", no_wrap=True)
    *parts, (label, total) = account_rows(measurement)
    for part, size in parts:
        table.add_row(part, megabytes(size))
    table.add_section()
    table.add_row(label, megabytes(total), style="bold")
    return table


def blind_spots(measured: Sequence[Measurement]) -> list[Text]:
    """What a figure counts that one would not think, and where two reports disagree."""
    lines = []
    on_chip = [one.account.on_chip_bytes for one in measured if one.account.on_chip_bytes]
    if on_chip:
        lines.append(
            Text(
                f"peak counts the on-chip memory of a TPU too, here up to {megabytes(max(on_chip))}"
                " MB; program code counts the constants"
            )
        )
    notes = dict.fromkeys(note for one in measured for note in one.account.notes)
    return lines + [Text(note, style="yellow") for note in notes]
