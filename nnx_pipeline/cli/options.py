"""Options that several commands share, and the objects that hold their values."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource
from jax.sharding import Mesh

from nnx_pipeline.cli import completion
from nnx_pipeline.config.config import Config
from nnx_pipeline.config.overrides import apply_overrides, parse_overrides
from nnx_pipeline.config.presets import preset
from nnx_pipeline.errors import InputError, counted, nearest
from nnx_pipeline.lab.compile.platform import GEMMS, Platform
from nnx_pipeline.lab.compile.settings import TRITON_GEMM, gemm_of, parse_settings
from nnx_pipeline.mesh import AXES, MeshConfig, make_mesh

Command = Callable[..., Any]


@dataclass(frozen=True)
class Chosen:
    """The values of `--model` and `--set`.

    - `model`: the name of a preset; None where a command works without one.
    - `assignments`: overrides of config fields, `key=value` each.
    """

    model: str | None
    assignments: tuple[str, ...]

    def words(self) -> list[str]:
        """These options as they are written on a command line."""
        model = ["--model", self.model] if self.model is not None else []
        return model + [word for text in self.assignments for word in ("--set", text)]

    def config(self) -> Config:
        """The config of the preset with its overrides.

        Raises InputError as in `apply_overrides`.
        """
        assert self.model is not None, "a command with an optional model asks for it first"
        return apply_overrides(preset(self.model), parse_overrides(self.assignments))


@dataclass(frozen=True)
class Target:
    """The values of `--mesh`, `--platform`, `--gemm` and `--xla`.

    - `mesh`: axis sizes such as `stage=4,fsdp=2`; the empty text is one device.
    - `platform`: what to compile for, such as `tpu:v5p:2x2x2`.
    - `gemm`: what matrix products become on NVIDIA platforms: `triton`, `cublas`, `both`, or None
      where the option is not given.
    - `xla`: settings of the compiler, `NAME=VALUE` or `@SET` each.
    """

    mesh: str
    platform: str
    gemm: str | None
    xla: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """These options as they are written on a command line."""
        gemm = ["--gemm", self.gemm] if self.gemm is not None else []
        settings = [word for text in self.xla for word in ("--xla", text)]
        return ["--mesh", self.mesh, "--platform", self.platform, *gemm, *settings]

    @property
    def mesh_config(self) -> MeshConfig:
        """The sizes of the mesh axes.

        Raises InputError for a text that is no mesh.
        """
        return MeshConfig.parse(self.mesh)

    def platforms(self, own: Sequence[str] = ()) -> list[Platform]:
        """The platform; an NVIDIA one once for each kind of matrix products that is asked for.

        - `own`: settings of one arm, which win over those of both.

        Raises InputError as in `Platform.parse`, for an unknown kind of matrix products, for
        `--gemm` with another platform, and for a setting that contradicts it.
        """
        settings = parse_settings(self.xla, own)
        platform = Platform.parse(self.platform).with_settings(settings)
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
        if (asked := gemm_of(settings)) is not None:
            if self.gemm not in (None, asked):
                raise InputError(
                    f"--gemm {self.gemm} and the compiler setting {TRITON_GEMM} contradict each "
                    "other; leave one of them out"
                )
            chosen = (asked,)
        return [dataclasses.replace(platform, gemm=one) for one in chosen]


@dataclass(frozen=True)
class Place:
    """The values of `--mesh` and `--platform`, for a command that runs on devices.

    - `mesh`: axis sizes such as `stage=4,fsdp=2`; the empty text is one device.
    - `platform`: `cpu` or `local`.
    """

    mesh: str
    platform: str

    @property
    def mesh_config(self) -> MeshConfig:
        """The sizes of the mesh axes; raises InputError for a text that is no mesh."""
        return MeshConfig.parse(self.mesh)

    def devices(self) -> Sequence[Any]:
        """The devices of the platform; raises InputError for a platform without devices."""
        target, number = Platform.parse(self.platform), self.mesh_config.num_devices
        if not target.is_real:
            raise InputError(
                f"--platform {self.platform} has no devices to run on; use cpu or local"
            )
        return target.devices(number)

    def grid(self, devices: Sequence[Any], config: Config) -> Mesh:
        """The mesh over these devices, with the kind of axes that the config says."""
        return make_mesh(self.mesh_config, devices, sharding=config.pipeline.sharding)


@dataclass(frozen=True)
class TwoArms(Target):
    """The values of `--xla-a` and `--xla-b`, beside those that both arms have in common.

    - `xla_a`, `xla_b`: settings of the compiler for one arm.
    """

    xla_a: tuple[str, ...] = ()
    xla_b: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, str]:
        """The option that gives each arm settings of its own; "" for an arm without."""
        return ("--xla-a" if self.xla_a else "", "--xla-b" if self.xla_b else "")

    @property
    def labels(self) -> tuple[str, str]:
        """What the arms are called where their settings are all that differs."""
        one, other = self.options
        if one and other:
            return one, other
        return ("with", "without") if one else ("without", "with")

    def pairs(self) -> list[tuple[Platform, Platform]]:
        """The platform of each arm; for NVIDIA once for each kind of matrix products.

        An arm whose settings choose the matrix products stands beside Triton's alone.

        Raises InputError as `platforms` does.
        """
        return list(zip(self.platforms(self.xla_a), self.platforms(self.xla_b), strict=False))


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
            shell_complete=completion.presets,
            **(needed if model else {"required": required}),
        ),
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Override a config field, such as model.num_layers=8; may be repeated.",
            shell_complete=completion.fields,
        ),
    )


def target_options(
    default_mesh: str, *, kind: type[Target] = Target
) -> Callable[[Command], Command]:
    """A decorator that adds `--mesh`, `--platform`, `--gemm` and `--xla`, received as `target`.

    - `default_mesh`: the default of `--mesh`; the empty text is one device.
    - `kind`: `TwoArms` for a command that also has `--xla-a` and `--xla-b`.
    """
    options = [mesh_option(default_mesh), platform_option, gemm_option]
    if kind is Target:
        help = (
            "Set an option of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536, or a set "
            "of them that MaxText publishes, such as @host_offload_flags (@ alone lists all); may "
            "be repeated."
        )
        return bundled("target", kind, *options, _xla_option("--xla", help))
    both = "Set an option of the compiler for both arms, as for `nnx-pipeline compile`."
    options += [_xla_option("--xla", both)]
    options += [_xla_option(f"--xla-{arm}", f"The same for arm {arm} alone.") for arm in "ab"]
    return bundled("target", kind, *options)


def _xla_option(name: str, help: str) -> Callable[[Command], Command]:
    return click.option(name, multiple=True, metavar="NAME=VALUE", help=help)


def mesh_option(default: str) -> Callable[[Command], Command]:
    """A decorator that adds `--mesh` with this default; the empty text is one device."""
    return click.option(
        "--mesh",
        default=default,
        show_default=default or "one device",
        metavar="AXES",
        help=f"Sizes of the mesh axes {', '.join(AXES)}; those left out are 1.",
        shell_complete=completion.axes,
    )


platform_option = click.option(
    "--platform",
    default="cpu",
    show_default=True,
    metavar="PLATFORM",
    help="cpu, local, tpu:v5p:2x2x2, cuda:h100:8 …",
    shell_complete=completion.platforms,
)

place_options = bundled("place", Place, mesh_option(""), platform_option)

gemm_option = click.option(
    "--gemm",
    metavar="triton|cublas|both",
    help="What computes matrix products on cuda platforms. Programs are compiled without a GPU, "
    "which would choose by autotuning; so the default is both, and both results are shown where "
    "they differ.",
)


def is_given(option: str) -> bool:
    """Whether the command line has the option that fills this parameter."""
    context = click.get_current_context()
    return context.get_parameter_source(option) is ParameterSource.COMMANDLINE


def step_title(model: str | None, config: Config, mesh: MeshConfig) -> str:
    """What is compiled: one training step of a preset on a mesh, and the shape of its batch."""
    train, pipeline = config.train, config.pipeline
    microbatches = pipeline.num_microbatches or mesh.stage
    told = f"batch {train.global_batch} × {train.sequence_length}"
    if mesh.stage > 1:
        told += f", {counted(microbatches, 'microbatch')}"
        told += f" × {pipeline.num_repeats} repeats" if pipeline.num_repeats > 1 else ""
        told += f", {pipeline.schedule}"
    return f"one training step of {model} on {mesh}: {told}"


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
        if name and name not in (option, *besides) and is_given(name)
    ]
    if unread:
        raise InputError(
            f"{flags[option]} cannot be combined with {', '.join(unread)}; leave one of them out"
        )
