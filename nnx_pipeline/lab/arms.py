"""What an experiment is: two arms, one difference, and the config that both need to show it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.sharding import Layout

Setup = Callable[[Config, MeshConfig], Config]


class Program(NamedTuple):
    """All that decides which training step is compiled on a mesh."""

    config: Config
    parts: Parts
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of an experiment: how it changes the config, the model's parts or its layout."""

    label: str
    configure: Callable[[Config], Config] = lambda config: config
    parts: Parts = field(default_factory=Parts)
    layout: Layout = field(default_factory=Layout)

    def program(self, config: Config) -> Program:
        """The program of this arm; InputError where the change does not go with the config."""
        return Program(self.configure(config), self.parts, self.layout)


_WHAT = {
    "stage": "a pipeline",
    "fsdp": "weights split over fsdp",
    "data": "several devices with the same weights",
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arm b does what the claim says is better; everything else is equal.

    claim: row of the source documents, or where else it stands. difference: in one sentence, with
    what `setup` brings. setup: what both arms need to show the difference. needs: mesh axes that
    must have two devices or more. tolerance: how far losses and gradients of the arms may lie apart
    at `tiny` in float32, relative to the largest value.
    """

    name: str
    claim: str
    difference: str
    a: Arm
    b: Arm
    setup: Setup = lambda config, mesh: config
    needs: tuple[str, ...] = ()
    by_default: bool = True
    tolerance: float = 1e-5

    def programs(self, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
        """Both arms on that config and mesh.

        Raises InputError when the experiment says nothing there: a mesh without the axes it is
        about, or a config that its arms or its setup contradict.
        """
        for axis in self.needs:
            if mesh.sizes()[axis] == 1:
                what = _WHAT[axis]
                raise InputError(f"needs {what}: give the mesh a {axis} axis of 2 or more")
        ready = self.setup(config, mesh)
        a, b = self.a.program(ready), self.b.program(ready)
        for program in (a, b):
            program.config.check_mesh(mesh)
        return a, b
