"""Which layer of a model is where in the stack `[repeats, stages, layers per stage]`, in numpy."""

from dataclasses import dataclass

import numpy as np

from nnx_pipeline.config._fields import MOST_LAYERS
from nnx_pipeline.lab.errors import InputError, counted, divides, do_not_split, shown


@dataclass(frozen=True)
class Stack:
    """The places of the layers: layer = (repeat · stages + stage) · per_stage + j.

    Places from the number `layers` on are padding. Layer i is of kind i mod kinds, and each kind
    has a stack of its own.
    """

    repeats: int
    stages: int
    per_stage: int
    layers: int
    kinds: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The first axes of a parameter: repeats, stages, and layers of its kind per stage."""
        return self.repeats, self.stages, self.per_stage // self.kinds

    @property
    def visits(self) -> int:
        return self.repeats * self.stages

    @property
    def padding(self) -> int:
        return self.visits * self.per_stage - self.layers

    def numbers(self, kind: int = 0) -> np.ndarray:
        """The number of each layer of a kind, int32 of `shape`."""
        everything = np.arange(self.visits * self.per_stage, dtype=np.int32)
        return everything.reshape(self.repeats, self.stages, -1)[:, :, kind :: self.kinds]

    def count(self, kind: int = 0) -> int:
        return len(range(kind, self.layers, self.kinds))


def make_stack(
    layers: int, *, stages: int, repeats: int, kinds: int = 1, pad: bool = False
) -> Stack:
    """The stack of a model with so many layers; `pad` fills the last stages of the last repeat."""
    visits = stages * repeats
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise InputError(
            f"num_layers={shown(layers)} is not a whole number from 1 to {MOST_LAYERS}; choose one"
        )
    if visits > MOST_LAYERS:
        raise InputError(
            f"{counted(stages, 'stage')} × {counted(repeats, 'repeat')} are more than a model has "
            f"layers at most ({MOST_LAYERS}); choose fewer"
        )
    per_stage = -(-layers // visits)
    if not pad:
        cycle = f" × {kinds} kinds in turn" if kinds > 1 else ""
        divides(
            visits * kinds,
            layers,
            rule=f"{do_not_split(layers, 'layer')} into {counted(stages, 'stage')} × "
            f"{counted(repeats, 'repeat')}{cycle}",
            cure="or set pipeline.pad_layers=true, which pads to "
            f"{visits * (-(-per_stage // kinds) * kinds)}",
        )
    per_stage = -(-per_stage // kinds) * kinds
    return Stack(repeats, stages, per_stage, layers, kinds)
