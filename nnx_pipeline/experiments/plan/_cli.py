"""The command `plan` and its options; what it does is imported when it runs."""

from __future__ import annotations

import click

from nnx_pipeline.experiments.plan.wanted import Chips, Spending, Written
from nnx_pipeline.lab._cli import completion, options
from nnx_pipeline.lab._cli.options import COUNT, bundled
from nnx_pipeline.lab._cli.values import Chosen


@click.command(
    "plan",
    short_help="Find the fastest layout for your chips.",
    epilog="Example: nnx-pipeline plan --model mixtral-8x7b --platform tpu:v5p:4x4x4 --price 4.2, "
    "or nnx-pipeline plan --model llama2-7b --set train.global_batch=16 --platform cuda:h100:8 "
    "--what-if cuda:h200:8",
)
@options.config_options()
@bundled(
    "chips",
    Chips,
    click.option(
        "--platform",
        required=True,
        metavar="PLATFORM",
        help="The chips, such as tpu:v5p:4x4x4 or cuda:h100:8; a layout takes all of them.",
        shell_complete=completion.platforms,
    ),
    click.option(
        "--what-if",
        "others",
        multiple=True,
        metavar="PLATFORM",
        help="Plan for these chips too, and show the best layout of each; may be repeated.",
        shell_complete=completion.platforms,
    ),
    click.option(
        "--price",
        "prices",
        multiple=True,
        metavar="[PLATFORM=]PRICE",
        help="What a chip costs per hour, such as 4.2, or cuda:h100=2.9 for one kind of chip; says "
        "what tokens cost. May be repeated.",
    ),
    options.memory_limit_option,
)
@bundled(
    "spending",
    Spending,
    click.option(
        "--minutes",
        type=click.FloatRange(0, 10_000, min_open=True),
        default=14.0,
        show_default=True,
        help="When to stop, for each platform.",
    ),
    click.option(
        "--most",
        type=COUNT,
        default=24,
        show_default=True,
        metavar="N",
        help="Most compiles, for each platform.",
    ),
)
@bundled(
    "written",
    Written,
    options.json_option,
    click.option(
        "--html",
        "html_path",
        metavar="PATH",
        help="Draw memory against time as one self-contained HTML page.",
    ),
)
def plan_command(chosen: Chosen, chips: Chips, spending: Spending, written: Written) -> None:
    """Find the fastest layout of a model that fits on given chips.

    A layout is a mesh, a schedule with repeats and microbatches, when weights are gathered, what
    is recomputed, how experts and attention are computed, and whether the optimizer is sharded over
    data. What --set sets is not searched. Layouts are listed, predicted by a few sums, and the best
    of them compiled, two at a time: what is compiled decides, and corrects the prediction.

    Before it starts it says how many compiles may come. Ctrl-C shows what there is so far. Programs
    are kept, so that the same command goes on from there. The last line is a command that trains.
    Exit 1 when no layout that was compiled fits.
    """
    config = options.chosen_config(chosen)
    from nnx_pipeline.lab._report.output import check_outputs

    check_outputs(json=written.json_path, html=written.html_path)
    from nnx_pipeline.experiments.plan.planning import run_plan

    run_plan(config, chosen, chips, spending, written)
