"""The pieces of a model that an experiment may exchange for another way to do the same."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array

from nnx_pipeline.ops.attention import Mask, allowed
from nnx_pipeline.ops.experts import DEFAULT_EXPERT_PARTS, ExpertParts
from nnx_pipeline.ops.loss import Loss, chunked_cross_entropy
from nnx_pipeline.ops.norm import ApplyScale, multiply_scale
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.stages import OverStages, over_stages
from nnx_pipeline.sharding import Constrain, constrain

Cast = Callable[[Array, jax.typing.DTypeLike], Array]


def cast_to_other(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """A cast that is left out where x has that dtype already (seeds S2.13b)."""
    return x if x.dtype == dtype else x.astype(dtype)


@dataclass(frozen=True)
class Parts:
    """Functions that the modules call; the defaults are the ones that measured best.

    Other functions with the same result stay within the lab's experiments and are handed in here.
    """

    apply_norm_scale: ApplyScale = multiply_scale
    over_stages: OverStages = over_stages
    loop: LoopParts = DEFAULT_PARTS
    constrain: Constrain = constrain
    loss: Loss = chunked_cross_entropy
    experts: ExpertParts = DEFAULT_EXPERT_PARTS
    mask: Mask = allowed
    cast_gradient: Cast = cast_to_other
