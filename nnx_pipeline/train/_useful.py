"""What a training step needs of a model, and what its schedule discards: for a step's MFU."""

from typing import NamedTuple

from nnx_pipeline.config.config import Config
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab._timing.devices import Device
from nnx_pipeline.lab._timing.precision import ProductPrecision, product_rate
from nnx_pipeline.lab.mesh import MeshConfig
from nnx_pipeline.pipeline.schedule import make_schedule

HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
PASSES = 3  # forward, and twice as much backward: gradients of inputs and of weights


class LayerFlops(NamedTuple):
    """Operations of one layer's forward pass for one token, in the mean of all layers.

    - `projections`: of attention.
    - `scores`: queries times keys, and scores times values.
    - `feed_forward`: the experts that the token is sent to, the shared ones and the router.
    """

    projections: float
    scores: float
    feed_forward: float


def useful_flops(config: Config, mesh: MeshConfig) -> float:
    """Operations of matrix products per device and training step that the model needs.

    - `config`: gives the sizes of the model and of the batch.
    - `mesh`: over whose devices they are divided.

    Counted as MaxText counts them: only the experts that a token is sent to, only the causal half
    of attention, nothing that is computed again, nothing in a bubble.
    """
    return _of_step(flops_per_token(config.model, config.train.sequence_length), config, mesh)


def peak_of(model: ModelConfig, device: Device | None) -> float | None:
    """Operations per second of a device in the products of a model; None where it has no figure.

    Quantized products may be faster than those in `dtype`, so that their peak is none.
    """
    if device is None or model.quantization:
        return None
    dtype = HLO_DTYPES[model.dtype]
    return product_rate(device, ProductPrecision((dtype, dtype)))


def flops_outside_layers(config: Config, mesh: MeshConfig) -> float:
    """Those of `useful_flops` that are not in the layers: the head's, which all devices share."""
    return _of_step(head_flops(config.model), config, mesh)


def _of_step(per_token: float, config: Config, mesh: MeshConfig) -> float:
    """Operations per device and training step, from the forward operations for one token."""
    tokens = config.train.global_batch * config.train.sequence_length
    return PASSES * tokens * per_token / mesh.num_devices


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations of the forward pass for one token.

    - `model`: the sizes of the model.
    - `sequence_length`: a token attends to half as many tokens on average, or to its window.
    """
    return model.num_layers * sum(flops_of_layer(model, sequence_length)) + head_flops(model)


def flops_of_layer(model: ModelConfig, sequence_length: int) -> LayerFlops:
    """The parts of `flops_per_token` that are in the layers, of one layer."""
    kinds = [_keys(kind.sliding_window, sequence_length) for kind in model.of_kinds]
    keys = sum(kinds) / len(kinds)
    active = model.num_experts_per_token + model.num_shared_experts
    experts = active * 3 * 2 * model.embed_dim * model.mlp_dim
    router = 2 * model.embed_dim * model.num_experts if model.num_experts > 1 else 0
    dense = model.num_dense_layers * 3 * 2 * model.embed_dim * (model.dense_mlp_dim or 0)
    routed = model.num_pipeline_layers * (experts + router)
    return LayerFlops(
        projections=_projections(model),
        scores=2 * keys * model.num_heads * _scores_and_values(model),
        feed_forward=(routed + dense) / model.num_layers,
    )


def _keys(window: int | None, sequence_length: int) -> float:
    """How many keys a query reads in the mean; the first tokens of a window have fewer."""
    window = min(window or sequence_length, sequence_length)
    return window - window**2 / (2 * sequence_length)


def _projections(model: ModelConfig) -> int:
    """Operations of the projections of one layer's attention for one token."""
    if model.kv_lora_rank is None:
        heads = 2 * (model.num_heads + model.num_kv_heads)
        return 2 * heads * model.embed_dim * model.head_dim
    rank, value_dim = model.kv_lora_rank, model.value_head_dim or 0
    source = model.q_lora_rank or model.embed_dim
    sizes = (
        model.embed_dim * (model.q_lora_rank or 0),
        source * model.num_heads * model.head_dim,
        model.embed_dim * (rank + model.rope_dim),
        rank * model.num_heads * (model.head_dim - model.rope_dim + value_dim),
        model.num_heads * value_dim * model.embed_dim,
    )
    return 2 * sum(sizes)


def _scores_and_values(model: ModelConfig) -> int:
    """The widths of a key and of a value, which each pair of query and key multiplies once."""
    return model.head_dim + (model.value_head_dim or model.head_dim)


def head_flops(model: ModelConfig) -> float:
    """Operations of the head's forward pass for one token."""
    return 2 * model.embed_dim * model.vocab_size


def bubble_share(config: Config, mesh: MeshConfig) -> float:
    """The part of the pipeline's ticks in which a stage works for nothing; 0 on one stage."""
    pipeline = config.pipeline
    schedule = make_schedule(
        pipeline.schedule,
        stages=mesh.stage,
        microbatches=pipeline.microbatches_on(mesh.stage),
        repeats=pipeline.num_repeats,
        delay=pipeline.forwarding_delay,
    )
    return schedule.bubble_share
