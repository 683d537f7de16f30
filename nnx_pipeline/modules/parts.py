"""Functions of a model that an experiment may replace by others with the same result."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array

from nnx_pipeline.ops.attention import Mask, allowed
from nnx_pipeline.ops.experts import DEFAULT_EXPERT_PARTS, ExpertParts
from nnx_pipeline.ops.loss import Loss, chunked_cross_entropy
from nnx_pipeline.ops.norm import ApplyScale, multiply_scale
from nnx_pipeline.pipeline.parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.sharding import Constrain, constrain

Cast = Callable[[Array, jax.typing.DTypeLike], Array]


def cast_to_other(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """`x` in `dtype`, without a cast if it has that dtype already (seeds S2.13b)."""
    return x if x.dtype == dtype else x.astype(dtype)


@dataclass(frozen=True)
class Parts:
    """Functions that the modules call; arms of experiments replace the defaults.

    - `apply_norm_scale`: multiplies by the scale of RMSNorm.
    - `loop`: functions of the loop over ticks.
    - `constrain`: holds activations to their sharding.
    - `loss`: the cross-entropy.
    - `experts`: functions of the mixture of experts.
    - `mask`: the attention mask.
    - `cast_gradient`: casts gradients to `TrainConfig.grad_dtype`.

    The defaults are what the library uses. A function that takes the place of one of them must have
    the same result.
    """

    apply_norm_scale: ApplyScale = multiply_scale
    loop: LoopParts = DEFAULT_PARTS
    constrain: Constrain = constrain
    loss: Loss = chunked_cross_entropy
    experts: ExpertParts = DEFAULT_EXPERT_PARTS
    mask: Mask = allowed
    cast_gradient: Cast = cast_to_other
