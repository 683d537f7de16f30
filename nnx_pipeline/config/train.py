"""The frozen config of the training, which checks its values when it is made."""

from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.config._fields import MOST_INTERVAL, MOST_TOKENS, check_choices
from nnx_pipeline.lab import errors
from nnx_pipeline.lab.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The batch, the loss and the AdamW optimizer.

    Raises InputError for values that are out of range or contradict each other.
    """

    global_batch: int = 16
    """Sequences of one training step, over all devices and microbatches."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    learning_rate: float = 3e-4
    """Learning rate of AdamW: the same at every step, or the largest of its schedule."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises evenly, from 0 at the first one."""
    learning_rate_decay: Literal["cosine", "linear"] | None = None
    """How the learning rate falls; None for not at all.

    It reaches its last value at step `schedule_steps`. After that step it is 0, as in MaxText, so
    that weights stay as they are.
    """

    schedule_steps: int | None = None
    """Steps from the beginning until the learning rate has fallen; `learning_rate_decay` needs it.
    """
    decay_steps: int | None = None
    """The last steps of `schedule_steps`, over which the learning rate falls.

    Between warmup and these it is constant (warmup-stable-decay). None for all steps after the
    warmup.
    """

    final_fraction: float = 0.1
    """The learning rate at the end of its decay, as a fraction of `learning_rate`."""
    adam_b1: float = 0.9
    """Decay rate of the first moment of the gradients."""
    adam_b2: float = 0.95
    """Decay rate of the second moment of the gradients."""
    adam_eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to every parameter."""
    clip_norm: float | None = 1.0
    """The largest global norm of the gradients; larger ones are scaled down. None scales none."""
    loss_chunks: int = 8
    """Number of pieces into which the cross-entropy cuts the sequence; divides its length.

    The logits of one piece exist at a time. `schedule=1f1b` computes the loss of each microbatch
    apart, and cuts it into fewer pieces, see `loss_chunks_of`.
    """

    master_dtype: Literal["float32"] | None = None
    """Dtype of a copy of the parameters which the optimizer updates, in the place of themselves.

    With `model.param_dtype=bfloat16` the parameters that layers read, gather and send take half of
    the bytes, and are this copy, rounded at the end of each step. Moments have its dtype too;
    gradients do with `grad_dtype=float32`.
    """

    accumulate_steps: int = 1
    """Steps whose gradients are averaged, in float32, before the weights change.

    The learning rate and its schedule count such changes, and `--steps` batches. With
    `pipeline.num_microbatches` gradients of one batch add up within a step, which takes no memory
    between steps and leaves a pipeline less bubble: prefer it where the batch fits.
    """

    max_skipped_steps: int = 0
    """How many steps in a row may be skipped, where loss or gradients are not finite or a spike.

    A step that is skipped leaves weights, moments and the schedule of the learning rate as they
    are, and its batch is not seen again. `nnx-pipeline train` names each of them, and ends at the
    first one beyond this number; with 0 nothing is skipped, and it ends where a loss is not finite.
    """

    spike_factor: float | None = None
    """Where a step is a spike: so many standard deviations above the mean of the last steps.

    It is enough that the loss or the norm of the gradients is. None for no spikes. MaxText and OLMo
    take 6.
    """

    spike_interval: int = 128
    """The number of last steps of `spike_factor`; no step is a spike before half as many."""
    load_balance_weight: float = 0.0
    """Weight in the loss of the router's load-balance loss, averaged over layers and microbatches.

    Where it is above 0, the number of microbatches is part of the loss: on a mesh with stages
    `pipeline.num_microbatches` must then be given. The metrics report the load balance of the
    microbatches, whatever its weight.
    """

    router_z_loss_weight: float = 0.0
    """Weight in the loss of the router's z-loss, averaged over layers and tokens.

    It is the mean of the squared logarithm of the sum of the exponentials of a token's logits
    (ST-MoE, Zoph et al., 2022), which keeps these small; the authors take 0.001.
    """

    dropout_seed: int = 0
    """Seed of dropout, 0 to 2**32 - 1; masks depend on it, the step, the layer and the sequence."""
    grad_dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the gradients that the optimizer gets; None for the dtype of the parameters.

    Where the loop over microbatches adds gradients up itself (`PipelineConfig.accumulates`:
    `backward=accumulate`, `schedule=1f1b`, or `fsdp_gather` other than `use`), gradients are also
    accumulated, and summed over `data`, in this dtype. `fsdp_gather=prefetch` sums over `fsdp` in
    this dtype too. The other values sum the gradients of each visit over `fsdp` in the dtype of the
    model, and `step` with `shard_optimizer_over_data` also over `data`. Elsewhere gradients are
    cast when they are complete; but `shard_optimizer_over_data` sums the gradients of the layers
    over `data` in this dtype. The optimizer's moments keep the dtype of the parameters.
    """

    shard_optimizer_over_data: bool = False
    """Whether the optimizer's state is sharded over the mesh axis `data` (ZeRO-1).

    Each device along `data` gets its shard of the gradients by reduce-scatter and computes the
    updates of that shard of the parameters, which are then gathered. Where in the loop gradients
    become shards depends on `PipelineConfig.fsdp_gather`. It has no effect on a mesh with data=1.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        errors.whole(self, "global_batch", "sequence_length", "loss_chunks", "accumulate_steps")
        tokens = self.global_batch * self.sequence_length
        if tokens > MOST_TOKENS:
            raise InputError(
                f"a batch of {self.global_batch:,} sequences (train.global_batch) of "
                f"{self.sequence_length:,} tokens (train.sequence_length) has {tokens:,} tokens; "
                f"choose {MOST_TOKENS:,} or less"
            )
        errors.at_least(self, 0.0, "learning_rate", "adam_eps", "weight_decay")
        self._check_schedule()
        self._check_guard()
        errors.at_least(self, 0.0, "load_balance_weight", "router_z_loss_weight")
        seed = self.dropout_seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise InputError(f"dropout_seed={seed!r} is not a whole number from 0 to 2**32 - 1")
        for name in ("adam_b1", "adam_b2"):
            if not 0 <= errors.number(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.clip_norm is not None and errors.number(self, "clip_norm") <= 0:
            raise InputError(
                f"clip_norm={self.clip_norm!r} must be above 0; set it to None to clip nothing"
            )
        length, chunks = self.sequence_length, self.loss_chunks
        rule = f"sequence_length={length} does not split into loss_chunks={chunks} pieces"
        cure = "or set train.loss_chunks to a number that divides it, such as 1"
        errors.divides(chunks, length, rule=rule, cure=cure)

    def _check_guard(self) -> None:
        """Raises InputError for options of steps that are skipped where none is."""
        errors.whole(self, "max_skipped_steps", least=0)
        errors.whole(self, "spike_interval", least=4, most=MOST_INTERVAL)
        if self.spike_factor is None:
            if self.spike_interval != TrainConfig.spike_interval:
                raise InputError(
                    f"spike_interval={self.spike_interval} is about spikes, for which "
                    "spike_factor=None does not look; set it, such as to 6"
                )
            return
        errors.above_zero(self, "spike_factor")
        if self.max_skipped_steps == 0:
            raise InputError(
                f"spike_factor={self.spike_factor} says which steps are skipped, and "
                "max_skipped_steps=0 skips none; set the latter to 1 or more"
            )

    def _check_schedule(self) -> None:
        """Raises InputError unless warmup and decay fit into the steps of the schedule."""
        errors.whole(self, "warmup_steps", least=0)
        errors.at_least(self, 0.0, "final_fraction")
        if self.learning_rate_decay is None:
            for name in ("schedule_steps", "decay_steps", "final_fraction"):
                value, default = getattr(self, name), getattr(TrainConfig, name)
                if value != default:
                    raise InputError(
                        f"{name}={value} is about a learning rate that falls, and "
                        f"learning_rate_decay=None keeps it; leave it at {default}, or set "
                        "learning_rate_decay to cosine or linear"
                    )
            return
        if self.schedule_steps is None:
            raise InputError(
                f"learning_rate_decay={self.learning_rate_decay!r} needs schedule_steps, the "
                "number of steps after which the learning rate has fallen; give that of the "
                "training"
            )
        errors.whole(self, "schedule_steps")
        if self.decay_steps is not None:
            errors.whole(self, "decay_steps", least=0)
        if self.final_fraction > 1:
            raise InputError(
                f"final_fraction={self.final_fraction} is more than the whole learning rate; "
                "choose 0 to 1"
            )
        needed = self.warmup_steps + (self.decay_steps or 0)
        if needed > self.schedule_steps:
            fall = f" + decay_steps={self.decay_steps}" if self.decay_steps else ""
            raise InputError(
                f"warmup_steps={self.warmup_steps}{fall} do not fit into "
                f"schedule_steps={self.schedule_steps}; choose {needed} or more for the latter"
            )

    def loss_chunks_of(self, microbatches: int) -> int:
        """The number of pieces for one of so many microbatches.

        It is the smallest divisor of the sequence's length with which a piece has no more tokens
        than one of the whole batch.
        """
        fewest = -(-self.loss_chunks // microbatches)
        return next(n for n in range(fewest, self.loss_chunks + 1) if self.sequence_length % n == 0)
