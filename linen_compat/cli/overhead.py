"""The command `linen-compat overhead`."""

import click

from linen_compat.overhead import check, measure_overhead
from linen_compat.overhead_arms import LOOPS
from linen_compat.overhead_report import overhead_view, write_overhead_picture
from nnx_pipeline import Config, InputError, preset
from nnx_pipeline.cli_support import Failed, progress
from nnx_pipeline.lab import report
from nnx_pipeline.overrides import apply_overrides, parse_overrides
from nnx_pipeline.pipeline.picture import check_picture

READ = ("train.global_batch", "train.sequence_length")


@click.command(epilog="Example: linen-compat overhead --layers 8 --loop scan --picture price.svg")
@click.option("--model", default="tiny", show_default=True, metavar="PRESET")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a field of model, train.global_batch or train.sequence_length; may come often.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Decoder layers. [default: the model's]")
@click.option(
    "--loop",
    "loops",
    multiple=True,
    type=click.Choice(LOOPS),
    help="What the layers run in; may come often. [default: all of them]",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--picture", "picture_path", metavar="PATH", help="Draw it as .png or .svg too.")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def overhead(
    model: str,
    assignments: tuple[str, ...],
    layers: int | None,
    loops: tuple[str, ...],
    repetitions: int,
    picture_path: str | None,
    json_path: str | None,
) -> None:
    """Measure what each style costs: NNX, Linen, either wrapped as the other, and Flax's wrappers.

    Abstract init, trace, lower, compile, temp bytes, size of the program, dispatch and host memory
    of value and gradient of a model's layers, on the CPU. All styles take turns in one run; a few
    minutes for the default model. Exit 1 when a style other than Flax's could not be measured.
    """
    config = configured(model, assignments, layers)
    report.check_writable(json_path, "--json")
    report.check_writable(picture_path, "--picture")
    check_picture(picture_path)
    chosen = tuple(loop for loop in LOOPS if loop in loops) or LOOPS
    check(config, chosen)
    with progress() as say:
        result = measure_overhead(config, repetitions=repetitions, loops=chosen, progress=say)
    report.show(overhead_view(result), json_path=json_path)
    report.emit_json(json_path, result.to_json())
    if picture_path:
        write_overhead_picture(result, picture_path)
    failed = [row for row in result.rows if row.error and not row.arm.startswith("Flax")]
    if failed:
        first = failed[0]
        raise Failed(f"{first.arm} could not be measured in {first.loop}: {first.error}")


def configured(model: str, assignments: tuple[str, ...], layers: int | None) -> Config:
    """The preset with its overrides; InputError for one that no figure depends on."""
    overrides = parse_overrides(assignments)
    chunks = {"train.loss_chunks": "1"}  # there is no loss over a vocabulary to cut up
    apply_overrides(preset(model), chunks | overrides)  # names the key nearest to an unknown one
    for key in overrides:
        if not key.startswith("model.") and key not in READ:
            raise InputError(
                f"--set {key} changes nothing that is measured here; "
                f"set a field of model, or {' or '.join(READ)}"
            )
    if layers is not None:
        if "model.num_layers" in overrides:
            raise InputError("--layers and --set model.num_layers say the same; give one of them")
        overrides["model.num_layers"] = str(layers)
    return apply_overrides(preset(model), chunks | overrides)
