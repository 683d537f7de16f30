"""Shows which layers each stage has, and what padding costs."""

from typing import Any

from rich.table import Table
from rich.text import Text

from nnx_pipeline.lab.errors import counted
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline._timetable.text import letters, span
from nnx_pipeline.pipeline.schedule import Schedule


def idle_share(stack: Stack, schedule: Schedule) -> float:
    """The fraction of the stages' time in which they idle or compute on padding."""
    places = stack.visits * stack.per_stage
    return 1 - (1 - schedule.bubble_share) * stack.layers / places


def summary_of_layers(stack: Stack, schedule: Schedule) -> str:
    visit = counted(stack.per_stage, "layer")
    if not stack.padding:
        return f"{counted(stack.layers, 'layer')}: {visit} per visit of a stage, no padding"
    places = stack.layers + stack.padding
    return (
        f"{counted(stack.layers, 'layer')}: {visit} per visit of a stage; {stack.padding} of "
        f"{places} places are padding, so that bubble and padding take "
        f"{idle_share(stack, schedule):.1%} of the stages' time"
    )


def layers_table(stack: Stack) -> Table:
    """A row per stage and a column per repeat: the layers of each visit."""
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    for repeat in range(stack.repeats):
        name = "layers" if stack.repeats == 1 else f"layers in repeat {letters(repeat)}"
        table.add_column(name, no_wrap=True)
    for stage, visits in enumerate(_of_stages(stack)):
        table.add_row(str(stage), *(_visit(numbers, stack) for numbers in visits))
    return table


def layers_to_json(stack: Stack, schedule: Schedule) -> dict[str, Any]:
    """`of_stage` has the numbers of the layers by stage and repeat."""
    return {
        "layers": stack.layers,
        "layers_per_visit": stack.per_stage,
        "padding": stack.padding,
        "idle_share": idle_share(stack, schedule),
        "of_stage": [[[*numbers] for numbers in visits] for visits in _of_stages(stack)],
    }


def _of_stages(stack: Stack) -> list[list[range]]:
    def visit(stage: int, repeat: int) -> range:
        first = (repeat * stack.stages + stage) * stack.per_stage
        return range(min(first, stack.layers), min(first + stack.per_stage, stack.layers))

    return [
        [visit(stage, repeat) for repeat in range(stack.repeats)] for stage in range(stack.stages)
    ]


def _visit(numbers: range, stack: Stack) -> Text:
    padding = stack.per_stage - len(numbers)
    text = Text(span(numbers) if numbers else "")
    if padding:
        text.append(f"{' + ' if numbers else ''}{padding} padding", style="dim")
    return text
