"""The claims about layers, loss and gradients, as experiments with one difference."""

import flax

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.lab import variants
from nnx_pipeline.lab.arms import Arm, Experiment
from nnx_pipeline.lab.settings import in_both, set_model, set_train
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.ops.experts import ExpertParts

FLAG = "flax_always_shard_variable"
NEEDS_GROUPED = "needs experts that are multiplied group by group, which this version does not have"


def _routed(config: Config, mesh: MeshConfig) -> Config:
    if config.model.num_experts == 1:
        raise InputError("needs routed experts: give the model num_experts of 2 or more")
    return config


def _routed_in_auto_mode(config: Config, mesh: MeshConfig) -> Config:
    return in_both(sharding="auto")(_routed(config, mesh), mesh)


def _float32_gradients(config: Config, mesh: MeshConfig) -> Config:
    return set_train(grad_dtype="float32")(config)


def _with_flag(config: Config, mesh: MeshConfig) -> Config:
    if not hasattr(flax.config, FLAG):
        raise InputError(f"flax {flax.__version__} has no flag {FLAG}")
    return config


def _experts(**parts: object) -> Parts:
    return Parts(experts=ExpertParts(**parts))  # type: ignore[arg-type]


EXPERTS = (
    Experiment(
        name="expert-sum",
        claim="S2.1",
        difference="the outputs of the experts add up in float32, or in the model's dtype, which "
        "rounds after each expert: with two per token once, as float32 does at the end; their "
        "numbers are compared in bfloat16",
        a=Arm(label="float32", parts=_experts(sum_dtype="float32")),
        b=Arm(label="model dtype", parts=_experts(sum_dtype=None)),
        setup=_routed,
        numbers_in="bfloat16",
        tolerance=0.05,
    ),
    Experiment(
        name="hidden-cast",
        claim="S2.9b",
        difference="an expert's hidden units are cast to the dtype that they have, or are not; JAX "
        "itself leaves such a cast out",
        a=Arm(label="cast", parts=_experts(hidden=variants.recast)),
        b=Arm(label="no cast"),
        setup=_routed,
    ),
    Experiment(
        name="expert-reshard",
        claim="S2.11",
        difference="constraints before and behind the experts say how the batch lies, with axes of "
        "one device named, or nothing but what the experts need; both in auto mode",
        a=Arm(
            label="in and out",
            parts=_experts(enter=variants.place_tokens, leave=variants.place_tokens),
        ),
        b=Arm(label="as needed"),
        setup=_routed_in_auto_mode,
    ),
    Experiment(
        name="expert-tiles",
        claim="S2.9a",
        difference="the tile sizes of grouped experts are nine numbers, or the three that are read",
        a=Arm(label="9 numbers"),
        b=Arm(label="3 numbers"),
        later=NEEDS_GROUPED,
    ),
    Experiment(
        name="grouped-experts",
        claim="S3.4",
        difference="every expert sees all tokens, or its own group of them, inside the pipeline",
        a=Arm(label="dense"),
        b=Arm(label="grouped"),
        later=NEEDS_GROUPED,
    ),
)

LAYERS = (
    Experiment(
        name="embedding",
        claim="S2.7",
        difference="tokens are looked up by a one-hot product, or by a gather",
        a=Arm(label="one-hot", configure=set_model(embedding="one_hot")),
        b=Arm(label="gather", configure=set_model(embedding="gather")),
    ),
    Experiment(
        name="segment-mask",
        claim="S2.8",
        difference="each row has segment ids, from which attention makes a mask, or is one segment "
        "by itself, for which a comparison of positions will do",
        a=Arm(label="segment ids", segment_ids=True),
        b=Arm(label="causal only"),
        by_default=True,
    ),
    Experiment(
        name="norm-scale",
        claim="S2.5",
        difference="RMSNorm applies its scale by an einsum, or by a product",
        a=Arm(label="einsum", parts=Parts(apply_norm_scale=variants.einsum_scale)),
        b=Arm(label="multiply"),
        by_default=True,
    ),
    *EXPERTS,
    Experiment(
        name="loss-chunks",
        claim="design",
        difference="cross-entropy sees all logits at once, or one chunk of the sequence",
        a=Arm(label="full logits", parts=Parts(loss=variants.full_cross_entropy)),
        b=Arm(label="chunked"),
        by_default=True,
    ),
    Experiment(
        name="gradient-cast",
        claim="S2.13b",
        difference="gradients in float32 are cast to float32, or are left alone; JAX itself leaves "
        "such a cast out",
        a=Arm(label="cast", parts=Parts(cast_gradient=variants.cast_always)),
        b=Arm(label="left alone"),
        setup=_float32_gradients,
    ),
    Experiment(
        name="shard-variable",
        claim="S2.13a",
        difference=f"Flax's {FLAG} is on, or off, so that variables are not placed as they are "
        "made; each in a process of its own",
        a=Arm(label="on", environment=((FLAG.upper(), "true"),)),
        b=Arm(label="off", environment=((FLAG.upper(), "false"),)),
        setup=_with_flag,
    ),
)
