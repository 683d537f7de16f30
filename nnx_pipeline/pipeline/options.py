"""Options of the loops over ticks, and of the weights that they use."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from nnx_pipeline.config._remat import FULL, Remat
from nnx_pipeline.lab.errors import InputError, one_of
from nnx_pipeline.pipeline._exchange import SHIFTS, ShiftName
from nnx_pipeline.pipeline.gather import FsdpGather
from nnx_pipeline.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """A hand-written backward pass that goes visit by visit with one gradient buffer per parameter.

    - `grad_dtype`: the dtype in which gradients add up; None for that of the parameters, in which
      they are returned.
    - `fsdp_gather`: which weights are gathered before the ticks that use them. If any are, the
      stage function and the microbatches have an axis of copies after the stages.
    """

    grad_dtype: jax.typing.DTypeLike | None = None
    fsdp_gather: FsdpGather = field(default_factory=FsdpGather)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a loop over ticks is run; except for rounding, no option changes the results.

    - `shift_by`: how activations are sent to the next stage.
    - `remat`: what to keep for the backward pass besides the input of each stage at each tick.
    - `saved_in_stage`: names that the checkpoint around a visit keeps in addition to those of
      `remat`, such as the inputs of the layers.
    - `accumulate`: how the loop adds up gradients. With None, JAX differentiates the circular loop
      by transposing its scan, and 1F1B, which always adds up gradients, uses the defaults.
    - `cast_at_use`: as in `WeightOptions`.
    - `sums_in_layers`: whether the stage function takes its weights `WithSums`.
    - `depths`: for each repeat the first place in which no stage has a layer, for the circular loop
      and a stage function that takes its side inputs `AtDepth`; () for places that all have one.
    - `bubble_fill`: the value of the buffers before anything arrives.

    Raises InputError for an unknown `shift_by`.
    """

    shift_by: ShiftName = "ppermute"
    remat: Remat = FULL
    saved_in_stage: tuple[str, ...] = ()
    accumulate: Accumulation | None = None
    cast_at_use: bool = False
    sums_in_layers: bool = False
    depths: tuple[int, ...] = ()
    bubble_fill: float = 0.0

    def __post_init__(self) -> None:
        one_of("shift_by", self.shift_by, SHIFTS)


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """In which dtypes a pipeline handles its weights and gradients, and how gradients are sharded.

    - `dtype`: to which weights are cast before they are gathered ahead of their use, and in which
      layers then get them: the one in which they compute. None does not cast them.
    - `grad_dtype`: in which gradients add up in the loop, and what has added up is summed over
      devices; None for that of the parameters. The gradients of single visits are summed over
      devices in their own dtype.
    - `zero1`: mesh axes along which each device gets only its shard of the gradients, if the layers
      are given as `Zero1Layers`; with () gradients are sharded like the parameters.
    - `cast_at_use`: whether layers keep the compiler from casting weights before the loop, as
      grouped experts do.

    Raises InputError for dtypes that are not floating, and for axes that do not shard the batch.
    """

    dtype: str | None = None
    grad_dtype: str | None = None
    zero1: tuple[str, ...] = ()
    cast_at_use: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and not _is_floating(value):
                raise InputError(f"{name}={value!r} is no floating dtype; give one, as 'bfloat16'")
        if not isinstance(self.zero1, tuple):
            raise InputError(f"zero1={self.zero1!r} is no tuple of mesh axes; write ('data',)")
        for axis in self.zero1:
            one_of("zero1", axis, Layout().batch)


def _is_floating(dtype: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False
