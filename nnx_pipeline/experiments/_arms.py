"""What an experiment is: two arms, one difference, and the config that both need to show it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from nnx_pipeline.config.config import Config
from nnx_pipeline.experiments._config_edits import with_fields
from nnx_pipeline.experiments._replaced import Replaced
from nnx_pipeline.lab.comparison.outcome import Kind, Quantity, Question
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.sharding.layout import Layout

# (config, mesh) to the config that both arms start from
Setup = Callable[[Config, MeshConfig], Config]
Under = Callable[[], contextlib.AbstractContextManager[None]]


class Program(NamedTuple):
    """Everything that decides what is compiled on a mesh, and which of its figures counts.

    - `config`: the config of model, training and pipeline.
    - `layout`: the mesh axes that each logical axis is sharded over.
    - `segment_ids`: whether a batch has segment ids, as where several documents share a row.
    - `kind`: `step` is a training step, `init` the creation of the parameters, and `trace` a
        training step, of which the host's memory during tracing counts.
    - `under`: makes a context to trace the program in; None for none.
    - `replaced`: functions of the library that others stand for while it is traced.
    """

    config: Config
    layout: Layout = Layout()
    segment_ids: bool = False
    kind: Kind = "step"
    under: Under | None = None
    replaced: tuple[Replaced, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of an experiment: how it changes the config, the layout or functions of the library.

    - `label`: its name in tables.
    - `configure`: changes the config that both arms start from.
    - `layout`, `segment_ids`, `under`, `replaced`: as for `Program`.
    """

    label: str
    configure: Callable[[Config], Config] = lambda config: config
    layout: Layout = field(default_factory=Layout)
    segment_ids: bool = False
    under: Under | None = None
    replaced: tuple[Replaced, ...] = ()

    def program(self, config: Config, kind: Kind = "step") -> Program:
        """The program of this arm.

        - `config`: the config that both arms start from.
        - `kind`: what of the program is measured, see `Program`.

        Raises InputError where the change does not fit the config.
        """
        return Program(
            config=self.configure(config),
            layout=self.layout,
            segment_ids=self.segment_ids,
            kind=kind,
            under=self.under,
            replaced=self.replaced,
        )


# What a mesh needs an axis for, in messages.
_WHAT = {
    "stage": "a pipeline",
    "fsdp": "weights split over fsdp",
    "data": "several devices with the same weights",
    "expert": "experts on several devices",
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Two arms, of which b does what a claim says is better; everything else is equal.

    - `name`: the name by which it is chosen.
    - `claim`: the row of the source documents, or another source of the claim.
    - `difference`: what differs between the arms, in one sentence, with what `setup` adds to both.
    - `a`, `b`: the arms.
    - `setup`: changes the config to what both arms need to show the difference.
    - `sizes`: fields of the model, with the values for which the claim was made. Both arms have
      them where they are measured, and not where their numbers are compared at `tiny`.
    - `kind`: what of the arms is measured, see `Program`.
    - `needs`: mesh axes that must have two devices or more.
    - `by_default`: whether it is in the short set, which runs if no experiment is named.
    - `same_program`: why both arms are one program before any compiler sees it, where they are.
    - `tolerance`: how far apart each value may be in the arms, relative to the largest value of its
      array.
    - `judged_by`: the figure that arm b should lower; the claims are about temp.
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
    same_program: str = ""
    # In float32 no experiment's arms lie farther apart than 6e-7, and many not at all.
    tolerance: float = 2e-6
    judged_by: Quantity = "temp"

    @property
    def question(self) -> Question:
        """The question that an outcome of this experiment answers."""
        return Question(
            name=self.name,
            claim=self.claim,
            difference=self.difference,
            labels=(self.a.label, self.b.label),
            kind=self.kind,
            judged_by=self.judged_by,
            same_program=self.same_program,
        )

    def programs(
        self, config: Config, mesh: MeshConfig, *, sized: bool = True
    ) -> tuple[Program, Program]:
        """The programs of both arms on a config and a mesh.

        - `config`: the config that the experiment changes.
        - `mesh`: the size of each mesh axis.
        - `sized`: whether both arms get the experiment's `sizes`.

        Raises InputError when the experiment says nothing there: for a mesh without the axes that
        it is about, or a config that its arms or its setup contradict.
        """
        for axis in self.needs:
            if mesh.sizes()[axis] == 1:
                what = _WHAT[axis]
                raise InputError(f"needs {what}: give the mesh a {axis} axis of 2 or more")
        if sized:
            config = with_fields(config, {"model": dict(self.sizes)})
        ready = self.setup(config, mesh)
        a, b = self.a.program(ready, self.kind), self.b.program(ready, self.kind)
        for program in (a, b):
            program.config.check_mesh(mesh)
        return a, b
