"""The command that draws a schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from nnx_pipeline.lab._cli.options import COUNT, bundled, json_option
from nnx_pipeline.lab._files import check_picture, read_text, save_figure, write_text
from nnx_pipeline.lab.errors import InputError

if TYPE_CHECKING:
    from nnx_pipeline.pipeline.schedule import Schedule

# stages × ticks of a timetable, and of one drawn by --both; this many take seconds
MOST_CELLS, MOST_DRAWN = 200_000, 20_000


@dataclass(frozen=True)
class Numbers:
    stages: int | None
    microbatches: int | None
    repeats: int
    delay: int
    layers: int | None
    stage_layers: str


@dataclass(frozen=True)
class ScheduleFiles:
    """The files of `schedule`; the timetable is written to all but `read`."""

    picture: str | None
    both: str | None
    csv: str | None
    read: str | None


@click.command(
    "schedule",
    short_help="Draw what each stage does at each tick.",
    epilog="Example: nnx-pipeline schedule --stages 4 --microbatches 8 --repeats 2",
)
@bundled(
    "numbers",
    Numbers,
    click.option("--stages", type=COUNT, help="Stages of the pipeline."),
    click.option(
        "--microbatches", type=COUNT, help="Microbatches of a step; a multiple of the stages."
    ),
    click.option(
        "--repeats",
        type=COUNT,
        default=1,
        show_default=True,
        help="How often each microbatch passes through all stages.",
    ),
    click.option(
        "--delay",
        type=click.IntRange(1, 2),
        default=1,
        show_default=True,
        help="Ticks until the output of a stage reaches the next stage; 1f1b needs 1.",
    ),
    click.option(
        "--layers",
        type=COUNT,
        help="Layers of the model, to show which stage has which, and what padding costs.",
    ),
    click.option(
        "--stage-layers",
        default="auto",
        show_default=True,
        metavar="LIST",
        help="How many layers each stage has in each repeat, as in pipeline.stage_layers.",
    ),
)
@click.option(
    "--schedule",
    "name",
    default="circular",
    show_default=True,
    metavar="NAME",
    help="circular or 1f1b.",
)
@bundled(
    "files",
    ScheduleFiles,
    click.option("--picture", metavar="PATH", help="Draw it also as .png or .svg."),
    click.option(
        "--both",
        metavar="PATH",
        help="Draw circular above 1f1b as .png or .svg, with both passes and the live "
        "microbatches of each.",
    ),
    click.option(
        "--csv", metavar="PATH", help="Write it also as CSV, in the form of PyTorch's pipelining."
    ),
    click.option(
        "--read", metavar="PATH", help="Read such a CSV in the place of the other options."
    ),
)
@json_option
def schedule_command(
    numbers: Numbers, name: str, files: ScheduleFiles, json_path: str | None
) -> None:
    """Draw what each stage does at each tick, and the bubble."""
    if files.read is not None:
        _show_actions(files, json_path)
        return
    if numbers.stages is None or numbers.microbatches is None:
        raise InputError("give --stages and --microbatches, or a timetable by --read")
    from nnx_pipeline.pipeline.schedule import make_schedule

    plan = make_schedule(
        name,
        stages=numbers.stages,
        microbatches=numbers.microbatches,
        repeats=numbers.repeats,
        delay=numbers.delay,
    )
    most = MOST_DRAWN if files.both else MOST_CELLS
    if plan.stages * plan.ticks > most:
        raise InputError(
            f"a timetable of {plan.stages} stages and {plan.ticks} ticks has more than "
            f"{most:,} cells; choose fewer stages, microbatches or repeats"
        )
    from nnx_pipeline.lab._report.output import check_outputs

    check_outputs(json=json_path, picture=files.picture, both=files.both, csv=files.csv)
    check_picture(files.picture)
    check_picture(files.both, "--both")
    if files.both and numbers.delay != 1:
        raise InputError(f"--both draws no delay; leave out --delay {numbers.delay}")
    _show_plan(plan, numbers, files, json_path)


def _show_plan(
    plan: Schedule, numbers: Numbers, files: ScheduleFiles, json_path: str | None
) -> None:
    from nnx_pipeline.lab._report.output import emit_json, show
    from nnx_pipeline.pipeline._stack import make_stack
    from nnx_pipeline.pipeline._timetable import text
    from nnx_pipeline.pipeline._timetable.actions import actions_of
    from nnx_pipeline.pipeline._timetable.figure import make_both, write_picture

    views: list[Any] = [text.summary(plan), text.Timetable(plan), text.legend(plan)]
    layers = {}
    if numbers.layers is not None:
        stack = make_stack(
            numbers.layers,
            stages=plan.stages,
            repeats=plan.repeats,
            stage_layers=numbers.stage_layers,
        )
        views += [text.summary_of_layers(stack, plan), text.layers_table(stack, plan)]
        layers = {"layers": text.layers_to_json(stack, plan)}
    for view in views:
        show(view, json_path=json_path)
    emit_json(json_path, {"schema": 1, **plan.to_json(), **layers})
    if files.picture:
        write_picture(plan, files.picture)
    if files.both:
        sizes = {"stages": plan.stages, "microbatches": plan.microbatches}
        save_figure(make_both(**sizes, repeats=plan.repeats), files.both)
    if files.csv:
        write_text(files.csv, actions_of(plan).to_csv())


def _show_actions(files: ScheduleFiles, json_path: str | None) -> None:
    from nnx_pipeline.lab._report.output import check_outputs, emit_json, show
    from nnx_pipeline.pipeline._timetable.actions import read_csv
    from nnx_pipeline.pipeline._timetable.text import ActionsTable, summary_of_actions

    context = click.get_current_context()
    from_the_line = click.core.ParameterSource.COMMANDLINE
    numbers = ("stages", "microbatches", "repeats", "delay", "layers", "stage_layers")
    for option in (*numbers, "name", "picture", "both", "csv"):
        if context.get_parameter_source(option) is from_the_line:
            flag = "schedule" if option == "name" else option.replace("_", "-")
            raise InputError(f"--{flag} has no meaning with --read; leave it out")
    check_outputs(json=json_path)
    if json_path and os.path.realpath(json_path) == os.path.realpath(str(files.read)):
        raise InputError(f"--json would write over {files.read}, which --read reads; name another")
    actions = read_csv(read_text(str(files.read)))
    for view in (summary_of_actions(actions), ActionsTable(actions)):
        show(view, json_path=json_path)
    emit_json(json_path, {"schema": 1, **actions.to_json()})
