"""The options of `convert`: the checkpoint that is read, and the one that is written."""

from dataclasses import dataclass

import click

from nnx_pipeline.lab._cli.options import COUNT, bundled

FORMATS = "maxtext:unscanned, maxtext:scanned, maxtext:pipelined, nnx, huggingface"


@dataclass(frozen=True)
class Source:
    """The checkpoint to convert, as given by SRC, `--from`, `--config` and `--parameters-only`."""

    checkpoint: str
    source_format: str
    config_name: str | None
    parameters_only: bool


@dataclass(frozen=True)
class Target:
    """The checkpoint to write, as given by DST, `--to`, `--stages` and `--repeats`."""

    path: str
    format: str
    stages: int | None
    repeats: int | None


source_options = bundled(
    "source",
    Source,
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
)

target_options = bundled(
    "target",
    Target,
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
