"""Presets for the commands: a package that has models offers them, by an entry point.

The lab itself measures functions. A module with the functions of `Presets` says what `--model` and
`--set` mean. Importing it imports no JAX: a TAB asks it for names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig

if TYPE_CHECKING:
    from nnx_pipeline.lab._cli.outputs import ComparisonOutputs
    from nnx_pipeline.lab._cli.values import Chosen, Measuring, TwoArms
    from nnx_pipeline.lab.compile.measure import Measurement, Progress
    from nnx_pipeline.lab.compile.platform import Platform
    from nnx_pipeline.lab.lint import Finding, Limits
    from nnx_pipeline.lab.search.choices import Choice, Space

GROUP = "nnx_pipeline.presets"


class Presets(Protocol):
    """What the module behind the entry point has; a config is whatever its functions take."""

    ADVICE: Mapping[str, str]
    """What to change where a step does not fit, by the role of what takes the memory."""

    def names(self) -> Sequence[str]: ...

    def fields(self) -> Sequence[str]:
        """The fields that `--set` can change, dotted."""

    def config_of(
        self, name: str, assignments: Sequence[str], mesh: MeshConfig | None = None
    ) -> Any:
        """The config of a preset, or of a file that is for a mesh, with overrides, `key=value`
        each; raises InputError."""

    def mesh_of(self, name: str, devices: int | None, slices: int) -> MeshConfig:
        """The mesh that a file asks for, on devices of several slices or hosts."""

    def to_dict(self, config: Any) -> dict[str, Any]:
        """The config as JSON has it."""

    def title(self, name: str, config: Any, mesh: MeshConfig) -> str:
        """What is measured: one training step of a preset on a mesh, and the shape of its batch."""

    def check(self, config: Any, axes: MeshConfig) -> None:
        """Raises InputError where the model does not fit on the mesh."""

    def measure_step(
        self,
        config: Any,
        mesh: MeshConfig,
        platform: Platform,
        *,
        progress: Progress = lambda text: None,
    ) -> Measurement:
        """Compiles one training step."""

    def experiments(self) -> Sequence[str]:
        """The names of what a preset can be compared with, beside other presets and settings."""

    def compare(
        self,
        names: Sequence[str],
        chosen: Chosen,
        target: TwoArms,
        measuring: Measuring,
        outputs: ComparisonOutputs,
    ) -> None:
        """Does what `compare` does with presets and experiments, which it has the options of."""

    def lint_config(self, config: Any, mesh: MeshConfig, limits: Limits) -> list[Finding]:
        """Looks for wasted memory in one training step."""

    def remat_space(self, config: Any, mesh: MeshConfig, *, offloads: bool) -> Space:
        """What the backward pass can keep, compute again or, with `offloads`, keep on the host."""

    def remat_settings(self, config: Any, space: Space, choice: Choice) -> list[str]:
        """What `--set` takes for a choice, `key=value` each."""


def is_file(name: str) -> bool:
    """Whether a name is that of a file with a config, rather than of a preset."""
    return name.endswith((".yml", ".yaml"))


def presets() -> Presets:
    """What the installed package offers; raises InputError unless there is exactly one."""
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    if len(entries) != 1:
        raise InputError(
            f"{', '.join(entries) or 'no installed package'} offers presets (the entry points "
            f"{GROUP}), and exactly one must; give a function, or install such a package"
        )
    (entry,) = entries.values()
    offered: Presets = entry.load()
    return offered
