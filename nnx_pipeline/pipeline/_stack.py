"""Which layer of a model is where in the stack `[repeats, stages, layers per stage]`, in numpy."""

import functools
from dataclasses import dataclass

import numpy as np

from nnx_pipeline.config._fields import MOST_LAYERS
from nnx_pipeline.config._stage_layers import layers_of_visits
from nnx_pipeline.lab.errors import InputError, counted, shown


@dataclass(frozen=True)
class Stack:
    """The places of the layers. A visit is a stage in a repeat, and has consecutive layers.

    Visits with fewer layers than others end with padding. Layer i is of kind i mod kinds, and each
    kind has a stack of its own.

    - `of_visits`: the layers of each visit, in the order in which a microbatch makes them.
    """

    repeats: int
    stages: int
    of_visits: tuple[int, ...]
    kinds: int = 1

    @functools.cached_property
    def layers(self) -> int:
        return sum(self.of_visits)

    @functools.cached_property
    def per_stage(self) -> int:
        return -(-max(self.of_visits) // self.kinds) * self.kinds

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

    @property
    def first_padding(self) -> int:
        """The number of padding in the first place; it and all later ones are no layers."""
        return -(-self.layers // self.kinds) * self.kinds

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The number of the first layer of each visit, int32."""
        return (np.cumsum(self.of_visits) - self.of_visits).astype(np.int32)

    def numbers(self, kind: int = 0) -> np.ndarray:
        """The number of each layer of a kind, int32 of `shape`.

        Padding has `first_padding` + its place among all places.
        """
        at = np.arange(self.per_stage, dtype=np.int32)
        places = self.first_padding + np.arange(self.visits, dtype=np.int32)[:, None] * len(at) + at
        real = at < np.asarray(self.of_visits)[:, None]
        everything = np.where(real, self.starts[:, None] + at, places)
        return everything.reshape(self.repeats, self.stages, -1)[:, :, kind :: self.kinds]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The place of each layer among all places of the stack of its kind."""
        found = np.empty(self.layers, np.int32)
        for kind in range(self.kinds):
            found[kind :: self.kinds] = np.flatnonzero(self.numbers(kind).ravel() < self.layers)
        return found

    def count(self, kind: int = 0) -> int:
        return len(range(kind, self.layers, self.kinds))

    @property
    def depths(self) -> tuple[int, ...]:
        """The places of each repeat in which some stage has a layer."""
        of_repeats = np.reshape(self.of_visits, (self.repeats, self.stages)).max(1)
        return tuple(-(-int(most) // self.kinds) * self.kinds for most in of_repeats)


def make_stack(
    layers: int, *, stages: int, repeats: int, kinds: int = 1, stage_layers: str | None = None
) -> Stack:
    """The stack of a model with so many layers; `stage_layers` as in `PipelineConfig`."""
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
    of_visits = layers_of_visits(
        layers, stages=stages, repeats=repeats, kinds=kinds, stage_layers=stage_layers
    )
    return Stack(repeats, stages, of_visits, kinds)
