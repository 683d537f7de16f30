"""Options that several commands have, and what they stand for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.lab.platform import GEMMS, Platform
from nnx_pipeline.mesh import AXES
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
        help=f"Sizes of {', '.join(AXES)}; those left out are 1.",
    )


def platform_option(command: Command) -> Command:
    return click.option(
        "--platform",
        default="cpu",
        show_default=True,
        metavar="PLATFORM",
        help="cpu, local, tpu:v5p:2x2x2, cuda:h100:8 …",
    )(command)


def gemm_option(command: Command) -> Command:
    return click.option(
        "--gemm",
        metavar="triton|cublas|both",
        help="What matrix products become on NVIDIA platforms, where no device can try; both if "
        "not given, and where they differ both are shown.",
    )(command)


def platforms(text: str, gemm: str | None) -> list[Platform]:
    """The platform, an NVIDIA one once for each kind of matrix product that is asked for.

    InputError as in `Platform.parse`, and for a kind where there is none.
    """
    platform = Platform.parse(text)
    if gemm is not None and gemm not in (*GEMMS, "both"):
        raise InputError(f"--gemm {gemm!r} is not known; {nearest(gemm, [*GEMMS, 'both'])}")
    if platform.kind != "cuda":
        if gemm is not None:
            raise InputError(f"--gemm {gemm} is of NVIDIA platforms; leave it out with {text}")
        return [platform]
    chosen = GEMMS if gemm in (None, "both") else (gemm,)
    return [dataclasses.replace(platform, gemm=one) for one in chosen]


def configured(model: str, assignments: tuple[str, ...]) -> Config:
    """The preset with its overrides; InputError as in `apply_overrides`."""
    return apply_overrides(preset(model), parse_overrides(assignments))


def check_alone(option: str, *besides: str) -> None:
    """Raises InputError for whatever else was given with an option that would not read it.

    option, besides: names of the parameters, of that option and of those that go with it.
    """
    context = click.get_current_context()
    flags = {one.name: one.opts[0] for one in context.command.params}
    unread = [
        flag
        for name, flag in flags.items()
        if name
        and name not in (option, *besides)
        and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if unread:
        raise InputError(f"{flags[option]} does not read {', '.join(unread)}; leave it out")
