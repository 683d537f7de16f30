"""The command line `linen-compat`; what its commands do is imported when they run."""

from __future__ import annotations

import os

# Otherwise the compilers warn about hardware that is not there; errors are still shown.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from dataclasses import dataclass

import click

from linen_compat._cli.overhead import overhead
from linen_compat._cli.values import WITHIN, Checks
from nnx_pipeline.lab._cli.options import COUNT, bundled
from nnx_pipeline.lab._cli.support import main_of
from nnx_pipeline.lab.errors import InputError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nnx-pipeline")
def commands() -> None:
    """Inspect, check and convert MaxText and Hugging Face checkpoints; measure wrapper cost."""


@commands.command(
    "inspect",
    short_help="Show the tree of a checkpoint.",
    epilog="Example: linen-compat inspect runs/mixtral/checkpoints",
)
@click.argument("checkpoint", metavar="CKPT")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def inspect_command(checkpoint: str, json_path: str | None) -> None:
    """Show layout, parameter count, dtypes and tree of a MaxText or nnx checkpoint.

    CKPT is a run (its latest step is taken), a step, or its folder of arrays. No array is read.
    """
    from linen_compat._cli.running import run_inspect

    run_inspect(checkpoint, json_path)


adapter_option = click.option(
    "--adapter", metavar="DIR", help="A LoRA adapter of PEFT or MaxText to merge into the weights."
)


@commands.command(
    "check",
    short_help="Check that a checkpoint fits a model.",
    epilog="Example: linen-compat check runs/mixtral/checkpoints --config mixtral.yml",
)
@click.argument("checkpoint", metavar="CKPT")
@click.option(
    "--config",
    "config_name",
    required=True,
    metavar="FILE",
    help="A MaxText YAML, a YAML with model, pipeline and train, a config.json of Hugging Face or "
    "its folder, or a preset.",
)
@bundled(
    "checks",
    Checks,
    click.option("--read", is_flag=True, help="Read every byte too, to find damage and NaN."),
    click.option(
        "--numerics", is_flag=True, help="Compare each layer's result with MaxText's mathematics."
    ),
    click.option("--allow-nan", is_flag=True, help="With --read, let NaN and infinity pass."),
    adapter_option,
    click.option(
        "--logits",
        metavar="FILE",
        help="Compare the model's logits with those in lines of JSON with `tokens` and `logits`, "
        "as MaxText's forward_pass_logit_checker reads and writes them.",
    ),
    click.option(
        "--within",
        type=click.FloatRange(0.0),
        metavar="PART",
        help=f"With --logits, how far they may be off, as a part of the largest ({WITHIN:g}).",
    ),
)
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def check_checkpoint(
    checkpoint: str, config_name: str, checks: Checks, json_path: str | None
) -> None:
    """Say which leaves a model would take from a checkpoint and which stay randomly initialised.

    Reads only metadata and the step counts, unless --read, --numerics or --logits is given. Exit 1
    unless everything fits. The state of another optimizer than AdamW is no misfit: what becomes of
    it is said.
    """
    if checks.allow_nan and not checks.read:
        raise InputError("--allow-nan has no effect without --read; add --read or leave it out")
    if checks.within is not None and checks.logits is None:
        raise InputError("--within has no effect without --logits; give FILE or leave it out")
    from linen_compat._cli.checking import run_check

    run_check(checkpoint, config_name, checks, json_path)


FORMATS = "maxtext:unscanned, maxtext:scanned, maxtext:pipelined, nnx, huggingface"


@dataclass(frozen=True)
class ConvertedFrom:
    """The checkpoint to convert, as given by SRC and the options of what is read."""

    checkpoint: str
    source_format: str
    config_name: str | None
    parameters_only: bool
    adapter: str | None


@dataclass(frozen=True)
class ConvertedTo:
    """The checkpoint to write, as given by DST, `--to`, `--stages` and `--repeats`."""

    path: str
    format: str
    stages: int | None
    repeats: int | None


source_options = bundled(
    "source",
    ConvertedFrom,
    click.argument("checkpoint", metavar="SRC"),
    click.option(
        "--from",
        "source_format",
        default="auto",
        show_default=True,
        metavar="FORMAT",
        help=f"The format of SRC: {FORMATS}; auto recognises it.",
    ),
    click.option("--config", "config_name", metavar="FILE", help="The config that SRC must fit."),
    click.option(
        "--parameters-only",
        is_flag=True,
        help="Leave the optimizer's state behind, whichever optimizer's it is.",
    ),
    adapter_option,
)

target_options = bundled(
    "target",
    ConvertedTo,
    click.argument("path", metavar="DST"),
    click.option(
        "--to", "format", required=True, metavar="FORMAT", help=f"The format of DST: {FORMATS}."
    ),
    click.option("--stages", type=COUNT, help="Stages of maxtext:pipelined or nnx."),
    click.option(
        "--repeats",
        type=COUNT,
        help="Repeats of maxtext:pipelined or nnx; 2 or more make the pipeline circular.",
    ),
)


@commands.command(
    short_help="Write a checkpoint in another format.",
    epilog="Example: linen-compat convert runs/7/items circular --to maxtext:pipelined "
    "--stages 4 --repeats 2",
)
@source_options
@target_options
@click.option("--allow-nan", is_flag=True, help="Keep NaN and infinity.")
def convert(source: ConvertedFrom, target: ConvertedTo, allow_nan: bool) -> None:
    """Write a checkpoint in another format or layout, with several arrays in work at once.

    DST must be a new name or an empty folder. It is filled under a temporary name, and gets its own
    name when everything is written. Every byte that is copied is read and checked.
    """
    from linen_compat._cli.running import run_convert
    from linen_compat.checkpoints._convert import From, To

    only, adapter = source.parameters_only, source.adapter
    opened = From(source.checkpoint, source.source_format, None, only, adapter)
    run_convert(opened, To(**vars(target)), source.config_name, keep_nan=allow_nan)


@commands.command(
    "formats",
    short_help="List the models that load, and from where.",
    epilog="Example: linen-compat formats",
)
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def formats_command(json_path: str | None) -> None:
    """List the classes of transformers and decoder blocks of MaxText that are read and written.

    Features outside the list are refused by name, and so are keys with values that a class does not
    have here.
    """
    from linen_compat._cli.running import run_formats

    run_formats(json_path)


commands.add_command(overhead)

main = main_of(commands, "linen-compat")

if __name__ == "__main__":
    main()
