"""Options that several commands have, and what they stand for."""

from collections.abc import Callable
from typing import Any

import click

from nnx_pipeline.config import Config
from nnx_pipeline.overrides import apply_overrides, parse_overrides
from nnx_pipeline.presets import preset

Command = Callable[..., Any]


def json_option(command: Command) -> Command:
    text = "Write the result as JSON; - is standard output."
    return click.option("--json", "json_path", metavar="PATH", help=text)(command)


def config_options(model: str | None, *, required: bool = True) -> Callable[[Command], Command]:
    """`--model`, with this default if there is one, and `--set`."""

    def add(command: Command) -> Command:
        command = click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a config field, such as model.num_layers=8; may come often.",
        )(command)
        needed: dict[str, Any] = {"default": model, "show_default": True}
        return click.option(
            "--model",
            metavar="PRESET",
            help="A preset; `nnx-pipeline models` lists them.",
            **(needed if model else {"required": required}),
        )(command)

    return add


def mesh_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--mesh",
        default=default,
        show_default=default or "one device",
        metavar="AXES",
        help="Sizes of data, stage, fsdp, tensor, expert; those left out are 1.",
    )


def platform_option(command: Command) -> Command:
    return click.option(
        "--platform",
        default="cpu",
        show_default=True,
        metavar="PLATFORM",
        help="cpu, local, tpu:v5p:2x2x2, cuda:h100:8 …",
    )(command)


def configured(model: str, assignments: tuple[str, ...]) -> Config:
    """The preset with its overrides; InputError as in `apply_overrides`."""
    return apply_overrides(preset(model), parse_overrides(assignments))
