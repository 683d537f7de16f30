"""What a command measures: a preset, or a function with its abstract arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from nnx_pipeline.lab._cli import completion
from nnx_pipeline.lab._cli.options import bundled, config_options
from nnx_pipeline.lab._cli.presets import is_file, presets
from nnx_pipeline.lab._cli.values import Chosen, Target
from nnx_pipeline.lab.errors import InputError, nearest, note
from nnx_pipeline.lab.mesh import Axes, MeshConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from nnx_pipeline.lab.compile.platform import Platform

WHAT = "a preset, a config.yml, MODULE:FUNCTION or FILE.py:FUNCTION"


@dataclass(frozen=True)
class GivenArguments:
    inputs: str | None
    arguments: tuple[str, ...]

    def on(
        self,
        config: MeshConfig | Axes,
        platform: Platform,
        numbers: Mapping[str, int] = MappingProxyType({}),
    ) -> tuple[Mesh | None, tuple[Any, ...]]:
        """The mesh over the devices of a platform, and the arguments, sharded as they say.

        `numbers` are what the function of `--inputs` is given by name.
        """
        import jax

        from nnx_pipeline.lab.compile._arguments import arguments_of
        from nnx_pipeline.lab.compile._places import mesh_on

        on_cpu = self.inputs is not None and not platform.is_real
        needed = config.num_devices if on_cpu or platform.kind == "cpu" else 1
        mesh = mesh_on(config, platform.devices(needed))
        alone = dataclasses.replace(config, dcn=None)  # CPU devices are of one host
        inputs_mesh = mesh_on(alone, jax.devices("cpu")) if on_cpu else mesh
        return mesh, arguments_of(self.inputs, self.arguments, inputs_mesh, numbers)


inputs_options = bundled(
    "inputs",
    GivenArguments,
    click.option(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="A function that returns the tuple of abstract arguments, a dict of those that are "
        "given by name, or both, instead of --arg.",
    ),
    click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="[NAME=]VALUE",
        help="An argument of the function, in order or by name: an array such as bf16[8@data,128] "
        "or x=f32[8,128], or a value of Python such as n=4; may be repeated.",
    ),
)


@dataclass(frozen=True)
class Subject:
    """One training step of a preset, or one call of a function, which has the config None."""

    name: str
    assignments: tuple[str, ...]
    inputs: GivenArguments
    config: Any
    mesh: MeshConfig | Axes  # Axes for a function

    def words(self) -> list[str]:
        """The words of a command line that name it."""
        inputs = ["--inputs", self.inputs.inputs] if self.inputs.inputs else []
        more = {"--set": self.assignments, "--arg": self.inputs.arguments}
        return [
            self.name,
            *inputs,
            *(word for flag, texts in more.items() for text in texts for word in (flag, text)),
        ]

    def title(self) -> str:
        if isinstance(self.mesh, MeshConfig):
            return presets().title(self.name, self.config, self.mesh)
        return f"{self.name} on {self.mesh}"


@dataclass(frozen=True)
class Shown:
    top: int
    tries: bool

    def check(self, subject: Subject, target: Target) -> None:
        """Raises InputError where nothing can be tried."""
        if subject.config is not None:
            raise InputError(
                f"--try is for a function, and {subject.name} is none; "
                f"nnx-pipeline compare {subject.name} compares it with other settings"
            )
        if target.gemm == "both":
            raise InputError(
                "--gemm both: with --try one kind of matrix products is compiled; write "
                "--gemm triton or --gemm cublas"
            )


def is_function(name: str) -> bool:
    return ":" in name


def subject_of(
    name: str | None,
    chosen: Chosen,
    inputs: GivenArguments,
    mesh: str,
    dcn: str = "",
    is_whole: bool = True,
) -> Subject:
    """What to measure, by `name` or by `--model`, with the mesh of `--mesh` and `--dcn`; raises
    InputError for options without use, and for a config that is not for the mesh unless a field of
    it is still to come, so that it is not whole."""
    if (name is None) == (chosen.model is None):
        count = "nothing is" if name is None else f"{name} and --model {chosen.model} are both"
        raise InputError(f"give one thing to measure: {WHAT}; {count} given")
    named = name or str(chosen.model)
    if name is not None and is_function(name):
        if chosen.assignments:
            raise InputError(
                f"--set {chosen.assignments[0]} needs a preset: a function has no config"
            )
        return Subject(name, (), inputs, None, Axes.parse(mesh, dcn=dcn))
    if inputs.inputs or inputs.arguments:
        raise InputError(f"--inputs and --arg are for a function; leave them out with {named}")
    offered = presets()
    known = offered.names()
    if named not in known and not is_file(named):
        raise InputError(f"{named!r} is not {WHAT}; of the presets {nearest(named, known)}")
    mesh_config = MeshConfig.parse(mesh, dcn=dcn)
    config = offered.config_of(named, chosen.assignments, mesh_config)
    if is_whole:
        offered.check(config, mesh_config)
    return Subject(named, chosen.assignments, inputs, config, mesh_config)


def subject_options(command: Callable[..., Any]) -> Callable[..., Any]:
    argument = click.argument(
        "name", required=False, metavar="SUBJECT", shell_complete=completion.presets
    )
    return argument(inputs_options(config_options(required=False, hidden=True)(command)))


def _mesh_of(file: str, platforms: Sequence[str]) -> dict[str, str]:
    """The values of `--mesh` and `--dcn` that a file asks for on the first of some platforms."""
    from nnx_pipeline.lab.compile.platform import Platform

    devices, slices = Platform.parse(platforms[0]).size if platforms else (None, 1)
    mesh = presets().mesh_of(file, devices, slices)
    texts = {"mesh": mesh, "dcn": mesh.dcn or MeshConfig()}
    return {
        name: ",".join(f"{k}={v}" for k, v in one.sizes().items() if v > 1)
        for name, one in texts.items()
    }


class OfSubject(click.Command):
    """A command that is given what it measures; after an old spelling it says the new one.

    Where that is a file, its mesh is taken unless `--mesh` names one.
    """

    def invoke(self, ctx: click.Context) -> Any:
        file = ctx.params.get("name") or next(iter(ctx.params.get("names") or ()), "")
        if is_file(file) and not ctx.params["mesh"]:
            found = _mesh_of(file, ctx.params.get("named") or ())
            ctx.params |= {name: found[name] for name in found if name in ctx.params}
        result = super().invoke(ctx)
        model, names = ctx.params["model"], ctx.params.get("names") or ctx.params.get("name") or ()
        words = [names] if isinstance(names, str) else [*names]
        if model is not None or ctx.info_name != self.name:
            old = [ctx.command_path, *words, *(("--model", model) if model else ())]
            new = ["nnx-pipeline", str(self.name), *filter(None, (model, *words))]
            note(f"{' '.join(old)} is now written {' '.join(new)}")
        return result
