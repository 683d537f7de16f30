"""The claims about layers, loss and gradients, as experiments whose arms differ in one thing."""

from nnx_pipeline.config.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.experiments import layer_variants as variants
from nnx_pipeline.experiments.arms import Arm, Experiment
from nnx_pipeline.experiments.config_edits import in_both, set_model, set_train
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.modules import Parts
from nnx_pipeline.ops.experts import ExpertParts
from nnx_pipeline.ops.grouped.experts import GroupedExperts

# Rows, width before and width after of each product: smaller rows in the backward pass.
NINE_TILES = (128, 128, 128, 64, 128, 128, 64, 128, 128)


def _routed(config: Config, mesh: MeshConfig) -> Config:
    """The config as it is; raises InputError if its model has no routed experts."""
    if config.model.num_experts == 1:
        raise InputError("needs routed experts: give the model num_experts of 2 or more")
    return config


def _routed_in_auto_mode(config: Config, mesh: MeshConfig) -> Config:
    return in_both(sharding="auto")(_routed(config, mesh), mesh)


def _routed_in_bfloat16(config: Config, mesh: MeshConfig) -> Config:
    return set_model(dtype="bfloat16")(_routed(config, mesh))


def _narrow_gradients(config: Config, mesh: MeshConfig) -> Config:
    """The config with gradients that are computed in bfloat16 and requested in float32."""
    return set_train(grad_dtype="float32")(set_model(param_dtype="bfloat16")(config))


def _experts(**parts: object) -> Parts:
    return Parts(experts=ExpertParts(**parts))  # type: ignore[arg-type]


EXPERTS = (
    Experiment(
        name="expert-sum",
        claim="S2.1",
        difference="the outputs of each token's experts, one array of [batch, seq, chosen, embed] "
        "as grouped experts give them, are summed in float32, or in the model's dtype; both in "
        "bfloat16",
        a=Arm(label="float32", parts=_experts(mix=variants.sum_chosen_in_float32)),
        b=Arm(label="model dtype", parts=_experts(mix=variants.sum_chosen_in_model_dtype)),
        setup=_routed_in_bfloat16,
        # A rounding to bfloat16 is 2^-9 = 0.002 of a value. XLA for the CPU sums in float32 in both
        # arms, which are then equal to the bit; a compiler may round once more in one of them.
        tolerance=0.005,
    ),
    Experiment(
        name="hidden-cast",
        claim="S2.9b",
        difference="an expert's hidden units are cast to float32 and back, which changes no value, "
        "or are not; both in bfloat16, because JAX leaves a cast to the same dtype out",
        a=Arm(label="cast", parts=_experts(hidden=variants.through_float32)),
        b=Arm(label="no cast"),
        setup=_routed_in_bfloat16,
    ),
    Experiment(
        name="expert-reshard",
        claim="S2.11",
        difference="tokens that are replicated along expert are sharded over it before the experts "
        "and gathered after them, with mesh axes of size 1 named, or stay as they are; both in "
        "auto mode",
        a=Arm(
            label="in and out",
            parts=_experts(enter=variants.tokens_in, leave=variants.tokens_out),
            layout=variants.WHOLE_OVER_EXPERTS,
        ),
        b=Arm(label="as needed", layout=variants.WHOLE_OVER_EXPERTS),
        setup=_routed_in_auto_mode,
        needs=("expert",),
    ),
    Experiment(
        name="expert-tiles",
        claim="S2.9a",
        difference="the tiles of grouped experts are nine numbers, with rows and widths of their "
        "own for the two products of the backward pass, or three that hold for all",
        a=Arm(label="9 numbers", parts=_experts(mix=GroupedExperts(tiles=NINE_TILES))),
        b=Arm(label="3 numbers", parts=_experts(mix=GroupedExperts(tiles=NINE_TILES[:3]))),
        setup=_routed,
    ),
    Experiment(
        name="grouped-experts",
        claim="S3.4",
        difference="every expert sees all tokens, or its own group of them, inside the pipeline",
        a=Arm(label="dense"),
        b=Arm(label="grouped", parts=_experts(mix=GroupedExperts())),
        setup=_routed,
    ),
)

LAYERS = (
    Experiment(
        name="embedding",
        claim="S2.7",
        difference="tokens are looked up by a one-hot product, or by a gather; both with a "
        "vocabulary of 102,400",
        a=Arm(label="one-hot", configure=set_model(embedding="one_hot")),
        b=Arm(label="gather", configure=set_model(embedding="gather")),
        sizes=(("vocab_size", 102_400),),
    ),
    Experiment(
        name="segment-mask",
        claim="S2.8",
        difference="each row has segment ids, from which attention gets a mask array of "
        "[batch, seq, seq], or is one segment, for which comparing positions is enough",
        a=Arm(label="segment ids", segment_ids=True, parts=Parts(mask=variants.mask_array)),
        b=Arm(label="causal only"),
    ),
    Experiment(
        name="norm-scale",
        claim="S2.5",
        difference="RMSNorm adds an offset of 0 to its scale and applies it by an einsum, or adds "
        "nothing and applies it by a product",
        a=Arm(label="einsum", parts=Parts(apply_norm_scale=variants.einsum_scale)),
        b=Arm(label="multiply"),
    ),
    *EXPERTS,
    Experiment(
        name="loss-chunks",
        claim="design",
        difference="cross-entropy computes all logits at once, or chunk by chunk of the sequence",
        a=Arm(label="full logits", parts=Parts(loss=variants.full_cross_entropy)),
        b=Arm(label="chunked"),
        by_default=True,
    ),
    Experiment(
        name="gradient-cast",
        claim="S2.13b",
        difference="gradients in bfloat16 are cast to a grad_dtype of float32, or are left alone "
        "where it is float32; both with parameters in bfloat16, because JAX leaves a cast to the "
        "same dtype out",
        a=Arm(label="cast"),
        b=Arm(label="left alone", parts=Parts(cast_gradient=variants.leave_gradient)),
        setup=_narrow_gradients,
    ),
    Experiment(
        name="shard-variable",
        claim="S2.13a",
        difference="while parameters are created, Flax's flax_always_shard_variable is on, and "
        "Flax constrains each variable to the sharding in its metadata, or off; both in auto mode",
        a=Arm(label="on", layout=variants.FlaxShardings(always=True)),
        b=Arm(label="off", layout=variants.FlaxShardings(always=False)),
        setup=in_both(sharding="auto"),
        kind="init",
    ),
)
