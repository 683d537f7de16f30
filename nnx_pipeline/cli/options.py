"""Options that several commands share, and the objects that hold their values."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.overrides import apply_overrides, parse_overrides
from nnx_pipeline.config.presets import preset
from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.lab.compile.platform import GEMMS, Platform
from nnx_pipeline.mesh import AXES, MeshConfig

Command = Callable[..., Any]


@dataclass(frozen=True)
class Chosen:
    """The values of `--model` and `--set`.

    - `model`: the name of a preset; None where a command works without one.
    - `assignments`: overrides of config fields, `key=value` each.
    """

    model: str | None
    assignments: tuple[str, ...]

    def config(self) -> Config:
        """The config of the preset with its overrides.

        Raises InputError as in `apply_overrides`.
        """
        assert self.model is not None, "a command with an optional model asks for it first"
        return apply_overrides(preset(self.model), parse_overrides(self.assignments))


@dataclass(frozen=True)
class Target:
    """The values of `--mesh`, `--platform` and `--gemm`.

    - `mesh`: axis sizes such as `stage=4,fsdp=2`; the empty text is one device.
    - `platform`: what to compile for, such as `tpu:v5p:2x2x2`.
    - `gemm`: what matrix products become on NVIDIA platforms: `triton`, `cublas`, `both`, or None
      where the option is not given.
    """

    mesh: str
    platform: str
    gemm: str | None

    @property
    def mesh_config(self) -> MeshConfig:
        """The sizes of the mesh axes.

        Raises InputError for a text that is no mesh.
        """
        return MeshConfig.parse(self.mesh)

    def platforms(self) -> list[Platform]:
        """The platform; an NVIDIA one once for each kind of matrix products that is asked for.

        Raises InputError as in `Platform.parse`, for an unknown kind of matrix products, and for
        `--gemm` with another platform.
        """
        platform = Platform.parse(self.platform)
        if self.gemm is not None and self.gemm not in (*GEMMS, "both"):
            raise InputError(
                f"--gemm {self.gemm!r} is not known; {nearest(self.gemm, [*GEMMS, 'both'])}"
            )
        if platform.kind != "cuda":
            if self.gemm is not None:
                raise InputError(
                    f"--gemm {self.gemm} applies only to cuda platforms; leave it out with "
                    f"{self.platform}"
                )
            return [platform]
        chosen = GEMMS if self.gemm in (None, "both") else (self.gemm,)
        return [dataclasses.replace(platform, gemm=one) for one in chosen]


def bundled(name: str, kind: type[Any], *options: Callable[[Command], Command]) -> Any:
    """A decorator that adds several options to a command and passes them on as one object.

    - `name`: the command's parameter that receives the object.
    - `kind`: the dataclass of the object, with one field for each option.
    - `options`: decorators of Click, in the order in which `--help` lists them.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_bundle(**given: Any) -> Any:
            fields = {field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            return command(**given, **{name: kind(**fields)})

        decorated: Command = with_bundle
        # Decorators apply from the bottom up: in reverse, `--help` lists them in the given order.
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return add


def json_option(command: Command) -> Command:
    """Adds `--json`, which the command receives as `json_path`."""
    text = "Write the result as JSON; - is standard output."
    return click.option("--json", "json_path", metavar="PATH", help=text)(command)


def config_options(model: str | None, *, required: bool = True) -> Callable[[Command], Command]:
    """A decorator that adds `--model` and `--set`, which the command receives as `chosen`.

    - `model`: the default of `--model`; None for no default.
    - `required`: whether `--model` must be given, where it has no default.
    """
    needed: dict[str, Any] = {"default": model, "show_default": True}
    return bundled(
        "chosen",
        Chosen,
        click.option(
            "--model",
            metavar="PRESET",
            help="A preset; `nnx-pipeline models` lists them.",
            **(needed if model else {"required": required}),
        ),
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a config field, such as model.num_layers=8; may be repeated.",
        ),
    )


def target_options(default_mesh: str) -> Callable[[Command], Command]:
    """A decorator that adds `--mesh`, `--platform` and `--gemm`, received as `target`.

    - `default_mesh`: the default of `--mesh`; the empty text is one device.
    """
    return bundled("target", Target, mesh_option(default_mesh), platform_option, gemm_option)


def mesh_option(default: str) -> Callable[[Command], Command]:
    """A decorator that adds `--mesh` with this default; the empty text is one device."""
    return click.option(
        "--mesh",
        default=default,
        show_default=default or "one device",
        metavar="AXES",
        help=f"Sizes of the mesh axes {', '.join(AXES)}; those left out are 1.",
    )


platform_option = click.option(
    "--platform",
    default="cpu",
    show_default=True,
    metavar="PLATFORM",
    help="cpu, local, tpu:v5p:2x2x2, cuda:h100:8 …",
)

gemm_option = click.option(
    "--gemm",
    metavar="triton|cublas|both",
    help="What computes matrix products on cuda platforms. Programs are compiled without a GPU, "
    "which would choose by autotuning; so the default is both, and both results are shown where "
    "they differ.",
)


def check_alone(option: str, *besides: str) -> None:
    """Raises InputError if the command line has options that would be ignored beside this one.

    - `option`: the name of the parameter that the option fills, such as `list_only`.
    - `besides`: names of the parameters that may be given with it.
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
        raise InputError(
            f"{flags[option]} cannot be combined with {', '.join(unread)}; leave one of them out"
        )
