"""The command `linen-compat overhead`."""

from dataclasses import dataclass

import click

from linen_compat._overhead import LOOPS
from nnx_pipeline.config._overrides import apply_overrides, parse_overrides
from nnx_pipeline.config.config import Config
from nnx_pipeline.config.presets import preset
from nnx_pipeline.lab._cli.options import COUNT, bundled
from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._files import check_picture, save_figure
from nnx_pipeline.lab.errors import InputError

READ = ("train.global_batch", "train.sequence_length")


@dataclass(frozen=True)
class ChosenLayers:
    """The model to measure, as given by `--model`, `--set` and `--layers`."""

    model: str
    assignments: tuple[str, ...]
    layers: int | None


@click.command(
    short_help="Compare the cost of NNX and Linen layers.",
    epilog="Example: linen-compat overhead --layers 8 --loop scan --picture price.svg",
)
@bundled(
    "chosen",
    ChosenLayers,
    click.option(
        "--model",
        default="tiny",
        show_default=True,
        metavar="PRESET",
        help="A preset; `nnx-pipeline models` lists them.",
    ),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a field of model, train.global_batch or train.sequence_length; may be "
        "repeated.",
    ),
    click.option("--layers", type=COUNT, help="Decoder layers. [default: the model's]"),
)
@click.option(
    "--loop",
    "loops",
    multiple=True,
    type=click.Choice(LOOPS),
    help="The loop that runs the layers; may be repeated. [default: all of them]",
)
@click.option(
    "--repetitions",
    type=COUNT,
    default=7,
    show_default=True,
    help="How often initialisation, tracing and lowering are timed; the medians are shown.",
)
@click.option("--picture", "picture_path", metavar="PATH", help="Draw it as .png or .svg too.")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def overhead(
    chosen: ChosenLayers,
    loops: tuple[str, ...],
    repetitions: int,
    picture_path: str | None,
    json_path: str | None,
) -> None:
    """Measure what it costs to write layers in NNX or Linen, or to wrap one as the other.

    There are six styles: NNX and Linen without a wrapper, and each wrapped as the other, by this
    project's wrapper and by Flax's own. For the value and the gradient of a model's layers, each
    style is initialised abstractly, traced, lowered, compiled and run on the CPU. The report has
    the times of these steps, the temporary memory and the number of instructions of the compiled
    program, and the memory that Python holds while it is traced. The default model takes a few
    minutes. Exit 1 when a style without Flax's wrapper could not be measured.
    """
    config = configured(chosen)
    import jax

    from linen_compat._overhead.measure import check_loops, measure_overhead
    from linen_compat._overhead.report import overhead_figure, overhead_view
    from nnx_pipeline.lab._cli.progress import progress
    from nnx_pipeline.lab._report.output import check_writable, emit_json, show

    jax.config.update("jax_platforms", "cpu")
    check_writable(json_path, "--json")
    check_writable(picture_path, "--picture")
    check_picture(picture_path)
    in_loops = tuple(loop for loop in LOOPS if loop in loops) or LOOPS
    check_loops(config, in_loops)
    with progress() as say:
        result = measure_overhead(config, repetitions=repetitions, loops=in_loops, progress=say)
    show(overhead_view(result), json_path=json_path)
    emit_json(json_path, result.to_json())
    if picture_path:
        save_figure(overhead_figure(result), picture_path)
    failed = [row for row in result.rows if row.error and not row.arm.startswith("Flax")]
    if failed:
        first = failed[0]
        raise Failed(f"{first.arm} could not be measured in {first.loop}: {first.error}")


def configured(chosen: ChosenLayers) -> Config:
    """The config of the preset with its overrides, on each of which a figure must depend."""
    model, layers = chosen.model, chosen.layers
    overrides = parse_overrides(chosen.assignments)
    chunks = {"train.loss_chunks": "1"}  # the measured loss has no vocabulary to split
    # An unknown key is refused here first, in a message that names the nearest known one.
    apply_overrides(preset(model), chunks | overrides)
    for key in overrides:
        if not key.startswith("model.") and key not in READ:
            raise InputError(
                f"--set {key} changes nothing that is measured here; "
                f"set a field of model, or {' or '.join(READ)}"
            )
    if layers is not None:
        if "model.num_layers" in overrides:
            raise InputError(
                "--layers and --set model.num_layers say the same; leave out one of the two"
            )
        overrides["model.num_layers"] = str(layers)
    return apply_overrides(preset(model), chunks | overrides)
