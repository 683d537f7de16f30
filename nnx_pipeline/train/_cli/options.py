"""The options of `train` that say what is trained on, and how long."""

from dataclasses import dataclass

import click

from nnx_pipeline.lab._cli.options import COUNT, bundled


@dataclass(frozen=True)
class Run:
    """The values of `--steps`, `--seed` and `--data`."""

    steps: int
    seed: int
    data: tuple[str, ...]


run_options = bundled(
    "run",
    Run,
    click.option(
        "--steps",
        type=COUNT,
        required=True,
        help="Training steps, counted from the beginning also with --resume.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Seed of the initial values and of the sequences.",
    ),
    click.option(
        "--data",
        multiple=True,
        metavar="FILE",
        help="Train on the bytes of a text file; may be repeated. The last tenth of each is held "
        "out. Without it sequences are generated.",
    ),
)
