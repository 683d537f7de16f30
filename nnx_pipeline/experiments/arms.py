"""What an experiment is: two arms, one difference, and the config that both need to show it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab.settings import set_model
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.sharding import Layout

Setup = Callable[[Config, MeshConfig], Config]
# Figures of a measurement that a verdict may be about.
Quantity = Literal["temp", "heap", "account", "trace_host"]
Under = Callable[[], contextlib.AbstractContextManager[None]]
Kind = Literal["step", "init", "trace"]


class Program(NamedTuple):
    """All that decides what is compiled on a mesh, and which of its figures counts.

    segment_ids: whether a batch has them, as where several documents share a row. kind: `step` is a
    training step, `init` the creation of the parameters, and `trace` a training step of which it
    counts what the host holds while it is traced. under: a context that it is traced in.
    """

    config: Config
    parts: Parts = Parts()
    layout: Layout = Layout()
    segment_ids: bool = False
    kind: Kind = "step"
    under: Under | None = None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of an experiment: how it changes the config, the model's parts or its layout.

    segment_ids, under: see `Program`.
    """

    label: str
    configure: Callable[[Config], Config] = lambda config: config
    parts: Parts = field(default_factory=Parts)
    layout: Layout = field(default_factory=Layout)
    segment_ids: bool = False
    under: Under | None = None

    def program(self, config: Config, kind: Kind = "step") -> Program:
        """The program of this arm; InputError where the change does not go with the config."""
        changed = self.configure(config)
        return Program(changed, self.parts, self.layout, self.segment_ids, kind, self.under)


_WHAT = {
    "stage": "a pipeline",
    "fsdp": "weights split over fsdp",
    "data": "several devices with the same weights",
    "expert": "experts on several devices",
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arm b does what the claim says is better; everything else is equal.

    claim: row of the source documents, or where else it stands. difference: in one sentence, with
    what `setup` brings. setup: what both arms need to show the difference. sizes: fields of the
    model at which the claim was made; both arms have them where they are measured, and not where
    their numbers are compared at `tiny`. kind: what of the arms is measured, see `Program`. needs:
    mesh axes that must have two devices or more. by_default: whether it is in the short set. later:
    why it can be named but not run, for what this version does not have. same_program: why both
    arms are one program before any compiler sees it, where they are. tolerance: how far the arms
    may lie apart in each value, relative to the largest of its array. judged_by: the figure of
    which arm b should hold less; the claims speak of temp.
    """

    name: str
    claim: str
    difference: str
    a: Arm
    b: Arm
    setup: Setup = lambda config, mesh: config
    sizes: tuple[tuple[str, int], ...] = ()
    kind: Kind = "step"
    needs: tuple[str, ...] = ()
    by_default: bool = False
    later: str = ""
    same_program: str = ""
    # In float32 no experiment's arms lie farther apart than 6e-7, and many not at all.
    tolerance: float = 2e-6
    judged_by: Quantity = "temp"

    def programs(
        self, config: Config, mesh: MeshConfig, *, sized: bool = True
    ) -> tuple[Program, Program]:
        """Both arms on that config and mesh.

        sized: whether they have the experiment's `sizes`. Raises InputError when the experiment
        says nothing there: a mesh without the axes it is about, or a config that its arms or its
        setup contradict.
        """
        if self.later:
            raise InputError(self.later)
        for axis in self.needs:
            if mesh.sizes()[axis] == 1:
                what = _WHAT[axis]
                raise InputError(f"needs {what}: give the mesh a {axis} axis of 2 or more")
        if sized:
            config = set_model(**dict(self.sizes))(config)
        ready = self.setup(config, mesh)
        a, b = self.a.program(ready, self.kind), self.b.program(ready, self.kind)
        for program in (a, b):
            program.config.check_mesh(mesh)
        return a, b
