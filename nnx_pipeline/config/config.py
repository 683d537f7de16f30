"""Frozen configs that check themselves when made, and jointly when combined.

The mesh is not part of `Config`: the same config runs on any mesh that it divides over, and
`Config.check_mesh` says why one does not fit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nnx_pipeline.errors import InputError, above_zero, at_least, divides, number, one_of, whole
from nnx_pipeline.mesh import MeshConfig
from nnx_pipeline.pipeline_config import PipelineConfig

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the model computes. One expert means an ordinary dense MLP without a router.

    `embedding` looks tokens up by a gather, by a one-hot product, or (auto) by the product unless
    its one-hot array would be above 2 GB. The product costs as much as the head.

    `attention_scale` multiplies the attention scores. It is 1.0 by default because, as in MaxText,
    the factor 1/sqrt(head_dim) is part of the query kernel's initial values.

    `max_position_embeddings` is the longest sequence that the model was made for. Nothing here
    depends on it; it comes from Hugging Face's `config.json` and goes back into it.

    `dropout_rate` is that of what attention and feed-forward add to the residual stream, in
    training only.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 1
    num_experts_per_token: int = 1
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    norm_epsilon: float = 1e-5
    norm_scale_offset: float = 0.0
    rope_theta: float = 1e6
    attention_scale: float = 1.0
    dropout_rate: float = 0.0
    attention: Literal["dot_product"] = "dot_product"
    experts: Literal["dense"] = "dense"
    embedding: Literal["auto", "gather", "one_hot"] = "gather"
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        whole(self, "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads")
        whole(self, "num_kv_heads", "head_dim", "num_experts", "num_experts_per_token")
        divides(
            self.num_kv_heads,
            self.num_heads,
            rule=f"num_heads={self.num_heads} does not split over num_kv_heads={self.num_kv_heads}",
        )
        divides(2, self.head_dim, rule=f"head_dim={self.head_dim} has no two rotary halves")
        if self.num_experts_per_token > self.num_experts:
            raise InputError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds "
                f"num_experts={self.num_experts}; choose {self.num_experts} or fewer"
            )
        one_of("dtype", self.dtype, DTYPES)
        one_of("param_dtype", self.param_dtype, DTYPES)
        one_of("attention", self.attention, ("dot_product",))
        one_of("experts", self.experts, ("dense",))
        one_of("embedding", self.embedding, ("auto", "gather", "one_hot"))
        if self.max_position_embeddings is not None:
            whole(self, "max_position_embeddings")
        at_least(self, 0.0, "norm_epsilon")
        number(self, "norm_scale_offset")
        above_zero(self, "rope_theta", "attention_scale")
        if not 0 <= number(self, "dropout_rate") < 1:
            raise InputError(f"dropout_rate={self.dropout_rate} must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The batch, the loss and AdamW. `loss_chunks` is the number of pieces of the sequence.

    `load_balance_weight` is what the router's load-balance loss counts, the mean over layers and
    microbatches. Where it is above 0, the number of microbatches is part of the loss: it must then
    be given on a mesh with stages. The load balance that is reported is that of the microbatches
    whatever it counts.

    What dropout leaves out is a function of `dropout_seed`, the step, the layer and the sequence.

    `grad_dtype` is the dtype of the gradients that the optimizer gets, None for that of the
    parameters. Where the loop over microbatches adds gradients up itself (`PipelineConfig`:
    `backward=accumulate`, `schedule=1f1b`, `fsdp_gather=step`) they also add up, and are summed
    over devices, in that dtype; elsewhere they are cast when they are complete. The optimizer's
    moments keep the dtype of the parameters.

    `shard_optimizer_over_data` (ZeRO-1) has each device along the mesh axis `data` own a part of
    the optimizer's state: gradients arrive there by reduce-scatter, it updates its part of the
    parameters, and these are gathered. It has no effect on a mesh with data=1.
    """

    global_batch: int = 16
    sequence_length: int = 1024
    learning_rate: float = 3e-4
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    loss_chunks: int = 8
    load_balance_weight: float = 0.0
    dropout_seed: int = 0
    grad_dtype: Literal["bfloat16", "float32"] | None = None
    shard_optimizer_over_data: bool = False

    def __post_init__(self) -> None:
        whole(self, "global_batch", "sequence_length", "loss_chunks")
        at_least(self, 0.0, "learning_rate", "adam_eps", "weight_decay", "load_balance_weight")
        seed = self.dropout_seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise InputError(f"dropout_seed={seed!r} is not a whole number from 0 to 2**32 - 1")
        for name in ("adam_b1", "adam_b2"):
            if not 0 <= number(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        above_zero(self, "clip_norm")
        one_of("shard_optimizer_over_data", self.shard_optimizer_over_data, (True, False))
        one_of("grad_dtype", self.grad_dtype, (None, "bfloat16", "float32"))
        divides(
            self.loss_chunks,
            self.sequence_length,
            rule=f"sequence_length={self.sequence_length} does not split into "
            f"loss_chunks={self.loss_chunks} pieces",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model, how it is pipelined and how it is trained."""

    model: ModelConfig
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.pipeline.num_microbatches is not None:
            self._check_batch(self.pipeline.num_microbatches)

    def _check_batch(self, microbatches: int) -> None:
        divides(
            microbatches,
            self.train.global_batch,
            rule=f"global_batch={self.train.global_batch} does not split into "
            f"{microbatches} microbatches",
        )

    def layers_per_stage(self, stages: int) -> int:
        """How many consecutive layers a stage applies each time a microbatch visits it."""
        return self.model.num_layers // (stages * self.pipeline.num_repeats)

    def for_batch(self, batch: int) -> "Config":
        """The same with another number of sequences in a batch."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, global_batch=batch))

    def check_mesh(self, mesh: MeshConfig) -> None:
        """Raises InputError, with the cure, unless everything here divides over `mesh`."""
        self.check_weights(mesh)
        self._check_pipeline(mesh)
        self._check_batch_on(mesh)

    def check_weights(self, mesh: MeshConfig) -> None:
        """Raises InputError, with the cure, unless `mesh` can hold the weights.

        No batch is needed for that; `check_mesh` is for where there is one.
        """
        repeats = self.pipeline.num_repeats
        if mesh.stage == 1 and repeats > 1:
            raise InputError(
                f"pipeline.num_repeats={repeats} needs a pipeline; "
                "set num_repeats=1 or give the mesh a stage axis of 2 or more"
            )
        for divisor, size, rule in self.weight_rules(mesh):
            divides(divisor, size, rule=rule)

    def weight_rules(self, mesh: MeshConfig) -> Iterator[tuple[int, int, str]]:
        """What must divide for `mesh` to hold the weights: divisor, size, and the rule in words."""
        model, repeats = self.model, self.pipeline.num_repeats
        rule = f"model.num_layers={model.num_layers} does not split into "
        yield (
            mesh.stage * repeats,
            model.num_layers,
            f"{rule}{mesh.stage} stages × {repeats} repeats",
        )
        for name, axes in MODEL_DIVISORS.items():
            divisor, size, spread = mesh.product(*axes), getattr(model, name), "×".join(axes)
            rule = f"model.{name}={size} does not split over {spread}={divisor} of the mesh"
            yield divisor, size, rule
        if self.train.shard_optimizer_over_data:
            owners, size = mesh.product("fsdp", "expert", "data"), model.embed_dim
            rule = f"model.embed_dim={size} does not split over fsdp×expert×data={owners} {_OWNED}"
            yield owners, size, rule

    def _check_pipeline(self, mesh: MeshConfig) -> None:
        """What a step needs of the mesh beside the weights and the batch."""
        stages, repeats = mesh.stage, self.pipeline.num_repeats
        microbatches = self.pipeline.microbatches_on(stages)
        if mesh.context > 1:
            raise InputError(
                f"mesh axis context={mesh.context} is not supported by attention yet; use context=1"
            )
        if stages == 1 and self.pipeline.schedule != "1f1b" and self.pipeline.fsdp_gather != "use":
            raise InputError(
                f"pipeline.fsdp_gather={self.pipeline.fsdp_gather} holds weights over the ticks of "
                "a pipeline; set it to use, give the mesh a stage axis of 2 or more, or set "
                "pipeline.schedule=1f1b"
            )
        divides(
            stages,
            microbatches,
            rule=f"pipeline.num_microbatches={microbatches} does not split over stage={stages}",
        )
        fewest = self.pipeline.forwarding_delay * stages
        if stages > 1 and microbatches < fewest:
            raise InputError(
                f"pipeline.num_microbatches={microbatches} is too few for stage={stages} with "
                f"pipeline.forwarding_delay={self.pipeline.forwarding_delay}; choose {fewest} or "
                "more"
            )
        at_once = microbatches == fewest or self.pipeline.schedule == "1f1b"
        if self.pipeline.shift == "pad" and repeats > 1 and at_once:
            raise InputError(
                f"pipeline.shift=pad loses what leaves the last stage, and with "
                f"pipeline.num_microbatches={microbatches} and "
                f"pipeline.schedule={self.pipeline.schedule} the first stage takes it at once; "
                "choose 'slice', or circular with more microbatches"
            )

    def _check_batch_on(self, mesh: MeshConfig) -> None:
        """Microbatches split over the devices that each of them runs on."""
        microbatches = self.pipeline.microbatches_on(mesh.stage)
        self._check_batch(microbatches)
        copies = mesh.data * mesh.fsdp * mesh.expert
        cut = mesh.stage > 1 or self.pipeline.schedule == "1f1b"
        microbatch = self.train.global_batch // (microbatches if cut else 1)
        divides(
            copies,
            microbatch,
            rule=f"a microbatch of {microbatch} sequences does not split over "
            f"data={mesh.data} × fsdp={mesh.fsdp} × expert={mesh.expert}: with "
            f"train.global_batch={self.train.global_batch} in {microbatches} microbatches, "
            "change one of the two so that a microbatch fits",
        )
        if self.train.shard_optimizer_over_data:
            batch = f"train.global_batch={self.train.global_batch} in {microbatches} microbatches"
            rule = f"{batch} does not split over data={mesh.data} {_OWNED}"
            divides(microbatches * mesh.data, self.train.global_batch, rule=rule)

    def check_objective(self, stages: int) -> None:
        """Raises InputError where the mesh alone would decide what the loss is.

        The router's load-balance loss is that of microbatches (see `PipelineConfig`), so that their
        number must be given where it counts and the mesh has stages.
        """
        routed = self.model.num_experts > 1 and self.train.load_balance_weight > 0
        default = self.pipeline.microbatches_on(stages)
        if routed and self.pipeline.num_microbatches is None and default > 1:
            raise InputError(
                "pipeline.num_microbatches=None is as many microbatches as fill the pipeline, "
                f"here {default}, and the router's loss, which train.load_balance_weight="
                f"{self.train.load_balance_weight} counts, is another one for each number of them; "
                f"set pipeline.num_microbatches={default}, on every mesh"
            )


# Every device along `data` then needs an equal part of each weight, and of each microbatch.
_OWNED = "of the mesh, as train.shard_optimizer_over_data=True asks; set it to False, or"

# Sizes of the model and the mesh axes that their arrays are spread over (see `sharding.Layout`).
MODEL_DIVISORS = {
    "vocab_size": ("stage", "tensor"),
    "embed_dim": ("fsdp", "expert"),
    "mlp_dim": ("tensor",),
    "num_heads": ("tensor",),
    "num_kv_heads": ("tensor",),
    "num_experts": ("expert",),
}

SECTIONS = {"model": ModelConfig, "pipeline": PipelineConfig, "train": TrainConfig}


def to_dict(config: Config) -> dict[str, dict[str, object]]:
    """The config as nested dictionaries of plain values, for JSON."""
    return dataclasses.asdict(config)
