"""What an experiment is: two arms, one difference, and the config that both need to show it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.sharding import Layout

Setup = Callable[[Config, MeshConfig], Config]
Quantity = Literal["temp", "heap", "account"]  # figures of `Memory` that a verdict may be about


class Program(NamedTuple):
    """All that decides which training step is compiled on a mesh.

    segment_ids: whether a batch has them, as where several documents share a row. environment:
    variables that must be set before anything is imported; a process of its own has them.
    """

    config: Config
    parts: Parts = Parts()
    layout: Layout = Layout()
    segment_ids: bool = False
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of an experiment: how it changes the config, the model's parts or its layout.

    segment_ids, environment: see `Program`. An arm with an environment changes nothing else but
    the config.
    """

    label: str
    configure: Callable[[Config], Config] = lambda config: config
    parts: Parts = field(default_factory=Parts)
    layout: Layout = field(default_factory=Layout)
    segment_ids: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.environment and (self.parts, self.layout) != (Parts(), Layout()):
            raise ValueError(f"arm {self.label}: functions do not reach another process")

    def program(self, config: Config) -> Program:
        """The program of this arm; InputError where the change does not go with the config."""
        changed = self.configure(config)
        return Program(changed, self.parts, self.layout, self.segment_ids, self.environment)


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
    must have two devices or more. by_default: whether it is in the short set. later: why it can be
    named but not run, for what this version does not have. numbers_in: dtype of the
    model where losses and gradients are compared at `tiny`. tolerance: how far they may lie apart,
    relative to the largest value. judged_by: the figure of which arm b should hold less; the
    claims speak of temp.
    """

    name: str
    claim: str
    difference: str
    a: Arm
    b: Arm
    setup: Setup = lambda config, mesh: config
    needs: tuple[str, ...] = ()
    by_default: bool = False
    later: str = ""
    numbers_in: str = "float32"
    tolerance: float = 1e-5
    judged_by: Quantity = "temp"

    def programs(self, config: Config, mesh: MeshConfig) -> tuple[Program, Program]:
        """Both arms on that config and mesh.

        Raises InputError when the experiment says nothing there: a mesh without the axes it is
        about, or a config that its arms or its setup contradict.
        """
        if self.later:
            raise InputError(self.later)
        for axis in self.needs:
            if mesh.sizes()[axis] == 1:
                what = _WHAT[axis]
                raise InputError(f"needs {what}: give the mesh a {axis} axis of 2 or more")
        ready = self.setup(config, mesh)
        a, b = self.a.program(ready), self.b.program(ready)
        for program in (a, b):
            program.config.check_mesh(mesh)
        return a, b
