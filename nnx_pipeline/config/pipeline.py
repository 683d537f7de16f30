"""The frozen config of the pipeline, which checks its values when it is made."""

from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.config._fields import MOST_LAYERS, MOST_MICROBATCHES, MOST_PARTS, check_choices
from nnx_pipeline.config._remat import LAYER_INPUT, parted, remat_of
from nnx_pipeline.config._stage_layers import numbers_in
from nnx_pipeline.lab.errors import InputError, whole


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the layers run over the `stage` axis of the mesh.

    Raises InputError for values that are out of range or contradict each other.
    """

    num_microbatches: int | None = None
    """Number of microbatches; None means as many as fill the pipeline: forwarding_delay · stages.

    A mesh without stages is a pipeline of one stage: several microbatches go through all layers one
    after the other. What a model computes does not depend on their number, except for what is
    computed per microbatch: the router's load-balance loss, a `MicrobatchMean`, and the state of
    layers. So that the numbers are the same on every mesh, it must be given where the mesh has
    stages and the load-balance loss has a weight (`train.load_balance_weight`) or the layers have
    state.
    """

    num_repeats: int = 1
    """How often a microbatch goes round all stages, each time through other layers.

    A circular schedule with one repeat is the plain pipeline.
    """

    stage_layers: str | None = None
    """How many layers each stage has in each repeat; None means equally many, or an error.

    `auto` spreads layers that do not divide, so that a step has as few ticks as possible with one
    layer more. Or a list such as `3,4,4,3`: a number for each stage, repeat after repeat, in the
    order in which a microbatch passes them. Every stage holds parameters for as many layers as the
    largest number. The places without a layer are padding: they compute what is discarded, except
    that the circular schedule leaves out a place at ticks at which no stage is in a repeat that has
    a layer there.
    """

    schedule: Literal["circular", "1f1b"] = "circular"
    """The order of forward and backward work.

    With `circular` the forward pass of all microbatches comes first. With `1f1b` each stage does
    the forward work of one microbatch and the backward work of another one at each tick, so that
    memory does not grow with their number; on a mesh without stages that is the accumulation of
    gradients over microbatches.
    """

    forwarding_delay: Literal[1, 2] = 1
    """Ticks from a stage's output to its use by the next stage; `1f1b` allows 1 only.

    With 2, activations are sent while the next tick computes, and the bubble doubles.
    """

    shift: Literal["ppermute", "slice", "pad"] = "ppermute"
    """How activations are sent to the next stage, see `pipeline.exchange.shift`.

    `ppermute` is one collective-permute. `slice` is a concatenation of two slices, from which the
    compiler makes the transfer. `pad` is a slice of a zero-padded array, which sends nothing from
    the last stage to the first.
    """

    sharding: Literal["explicit", "auto"] = "explicit"
    """The kind of mesh axes that the commands make; `make_mesh(…, sharding=…)` in Python."""
    remat: str = "full"
    """What the backward pass keeps, beside the input of a stage at each tick.

    `full`, `save_out_proj`, `save_qkv_proj`, `save_dot_except_mlp`, `minimal`, `inputs_offloaded`,
    `qkv_proj_offloaded`, `minimal_offloaded` or `none`, whose meanings are in `remat.POLICIES`; or
    names of values, as in `keep:query_proj+out_proj/offload:decoder_layer_input`. What is offloaded
    is kept in host memory, and all other values are computed again. The names are `query_proj`,
    `key_proj`, `value_proj`, `out_proj`, `mlp_gate` and `mlp_up`, and for `offload` also
    `decoder_layer_input`. `nnx-pipeline fit PRESET --over remat` searches for the fastest choice.
    """

    remat_groups: int = 1
    """Into how many groups the layers of a stage are divided, one after the other in turn.

    Names in `remat` may then be those of one group: with 4 groups `keep:mlp_up@1` keeps the value
    in the first layer of every four. Layers in a loop are taken together, a layer of each group.
    Dense layers before layers with experts are in none.
    """

    save_decoder_layer_input: bool = True
    """Whether the backward pass also keeps the input of each layer, where a stage has several.

    If not, it computes these inputs again, which runs the layers before them once more.
    """

    unrolled_layers: int = 4
    """Up to so many layers of a stage are unrolled into the program; more run in a loop.

    Unrolled layers compute less, because each has weights and gradients in arrays of its own. They
    take longer to compile, and with 1F1B or `backward=accumulate` more memory. Any number is
    unrolled under a policy of `remat` that offloads.
    """

    batch_split: int = 1
    """Into how many parts each device cuts its sequences of a microbatch, layer by layer.

    The parts go through a layer side by side, so that a part may compute while another waits for a
    collective, such as the all-to-all of experts (DeepSeek-V3, 2024, section 3.2.1). It is for
    layers without state, and not for those that run before the pipeline.
    """

    fsdp_gather: Literal["use", "step", "prefetch"] = "use"
    """When a stage gathers weights that are sharded over fsdp.

    - `use`: at each use.
    - `step`: once per step; each device then holds all its stage's weights gathered. The gradient
      of each visit is summed over fsdp at once, so that it holds full gradients of one visit only.
    - `prefetch`: repeat by repeat, the next repeat while the present one is in use; each device
      then holds gathered weights and full gradients of two repeats. With one repeat it is the same
      as `step`.

    With `TrainConfig.shard_optimizer_over_data`, `step` and `prefetch` gather over data too, from
    the shards of ZeRO-1. With `step` gradients then add up as shards, because those of each visit
    are summed over data too. With `prefetch` the full gradients of a repeat are summed over data
    when the repeat is finished, and with `use` those of the step, once.
    """

    backward: Literal["autodiff", "accumulate"] | None = None
    """How the circular schedule is differentiated.

    `autodiff` leaves it to JAX. `accumulate` differentiates visit by visit (a visit is one stage
    at one tick), with one gradient buffer per parameter. None means `autodiff` if `fsdp_gather` is
    `use`, and `accumulate` otherwise. With `1f1b` it must be None.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        whole(self, "num_repeats")
        numbers_in(self.stage_layers)
        whole(self, "unrolled_layers", most=MOST_LAYERS)
        whole(self, "remat_groups", most=MOST_LAYERS)
        whole(self, "batch_split", most=MOST_PARTS)
        if self.num_microbatches is not None:
            whole(self, "num_microbatches", most=MOST_MICROBATCHES)
        if self.gathers_before_use and self.backward == "autodiff":
            raise InputError(
                f"pipeline.fsdp_gather={self.fsdp_gather} adds gradients up over ticks, which "
                "pipeline.backward=autodiff does not; leave backward out or set it to accumulate"
            )
        remat = remat_of(self.remat)
        for name in (*(remat.saved or ()), *remat.offloaded):
            if int(parted(name)[1] or 0) > self.remat_groups:
                raise InputError(
                    f"pipeline.remat={self.remat} names {name}, but there are "
                    f"pipeline.remat_groups={self.remat_groups}; set as many groups"
                )
        if LAYER_INPUT in remat.offloaded and not self.save_decoder_layer_input:
            raise InputError(
                f"pipeline.remat={self.remat} sends the input of each layer to the host, which "
                "pipeline.save_decoder_layer_input=False would not keep; leave that out"
            )
        if self.schedule == "1f1b":
            self._check_one_f_one_b()

    def _check_one_f_one_b(self) -> None:
        for name, only in (("forwarding_delay", 1), ("backward", None)):
            if getattr(self, name) != only:
                raise InputError(
                    f"pipeline.{name}={getattr(self, name)} is for the circular schedule; "
                    f"with pipeline.schedule=1f1b leave it at {only}"
                )
        if self.prefetches:
            raise InputError(
                "pipeline.fsdp_gather=prefetch holds the weights of two consecutive repeats, but "
                "with pipeline.schedule=1f1b and pipeline.num_repeats="
                f"{self.num_repeats} the forward and the backward work of a stage are in different "
                "repeats; choose use or step"
            )

    @property
    def accumulates(self) -> bool:
        """Whether the loop itself adds gradients up, in place of JAX's autodiff."""
        if self.backward is not None:
            return self.backward == "accumulate"
        return self.schedule == "1f1b" or self.gathers_before_use

    @property
    def gathers_before_use(self) -> bool:
        """Whether weights are gathered over fsdp before the ticks that use them."""
        return self.fsdp_gather != "use"

    @property
    def prefetches(self) -> bool:
        """Whether the weights of a repeat are gathered while the repeat before it is in use."""
        return self.fsdp_gather == "prefetch" and self.num_repeats > 1

    def microbatches_on(self, stages: int) -> int:
        """The number of microbatches on a mesh with `stages` stages."""
        return self.num_microbatches or stages * self.forwarding_delay

    def loops_on(self, stages: int) -> bool:
        """Whether microbatches go through the layers one by one on a mesh with `stages` stages.

        If not, the layers run on the whole batch, and JAX differentiates them.
        """
        return stages > 1 or self.microbatches_on(stages) > 1 or self.accumulates
