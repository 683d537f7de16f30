"""The table of `nnx-pipeline memory`, from Python."""

import html
from collections.abc import Callable
from dataclasses import dataclass

from nnx_pipeline.lab._report.output import as_text
from nnx_pipeline.lab._report.tables import buffers_of, memory_report
from nnx_pipeline.lab.api import measure
from nnx_pipeline.lab.attribution._result import Buffer
from nnx_pipeline.lab.compile._places import AnyMesh
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.mesh import Axes


@dataclass(frozen=True)
class MemoryTable:
    """What a program holds at its peak: printed, or last in the cell of a notebook, it is the table
    of `nnx-pipeline memory`.

    - `measurement`: all that is measured of the program.
    - `top`: how many rows of a table are shown; all others are summed in one more row.
    """

    measurement: Measurement
    top: int = 20

    @property
    def rows(self) -> tuple[Buffer, ...]:
        """What the heap holds, largest first: bytes, shape, operation, line of source and role."""
        return buffers_of(self.measurement).buffers

    def __str__(self) -> str:
        title = f"{self.measurement.config['function']} on {Axes(self.measurement.mesh)}"
        return as_text(memory_report(title, self.measurement, top=self.top))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def memory(
    function: Callable[..., object],
    *arguments: object,
    mesh: AnyMesh = None,
    platform: Platform | str = "cpu",
    top: int = 20,
    progress: Progress = lambda text: None,
) -> MemoryTable:
    """Compiles a function and says what it holds at its peak: print the result.

    - `function`, `arguments`, `mesh`, `platform`, `progress`: as for `measure`.
    - `top`: how many rows of a table are shown.

    Raises InputError as `measure` does, and where the compiler gave no buffer assignment.
    """
    measurement = measure(function, *arguments, mesh=mesh, platform=platform, progress=progress)
    buffers_of(measurement)
    return MemoryTable(measurement, top)
