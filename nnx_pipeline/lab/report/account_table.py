"""The account of a device's memory as a table, with remarks on its figures."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.attribution.account import ROWS
from nnx_pipeline.lab.compile.measure import Measurement
from nnx_pipeline.lab.report.memory_tables import megabytes

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
    """Label and bytes of each part of the account, with their sum last.

    A label that starts with spaces is for bytes that are part of the row above it.
    """
    account = measurement.account
    rows: list[tuple[str, int | None]] = []
    for label, size in account.rows().items():
        rows.append((label, size))
        if label == ROWS["output_bytes"] and account.scratch_bytes:
            rows.append(("  of these, used by temporaries first", account.scratch_bytes))
    return [*rows, (TOTAL, account.total_bytes)]


def account_table(measurement: Measurement) -> Table:
    """What the program holds in device memory, in MB, with the sum in the last row."""
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
    """Remarks on what a figure counts unexpectedly, and on where two reports disagree."""
    lines = []
    peaks = [one for one in measured if one.memory.peak_bytes is not None]
    on_chip = [one.account.on_chip_bytes for one in peaks if one.account.on_chip_bytes]
    if on_chip:
        lines.append(
            Text(
                "peak includes the on-chip memory of a TPU, here up to "
                f"{megabytes(max(on_chip))} MB; program code includes the constants"
            )
        )
    notes = dict.fromkeys(note for one in measured for note in one.account.notes)
    return lines + [Text(note, style="yellow") for note in notes]
