"""The pieces of a model that an experiment may exchange for another way to do the same."""

from dataclasses import dataclass

from nnx_pipeline.ops.loss import Loss, chunked_cross_entropy
from nnx_pipeline.ops.norm import ApplyScale, multiply_scale
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.stages import OverStages, over_stages
from nnx_pipeline.sharding import Constrain, constrain


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
