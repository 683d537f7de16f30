"""How the layers run over the stages: a frozen config that checks itself when made."""

from dataclasses import dataclass
from typing import Literal

from nnx_pipeline.errors import InputError, one_of, whole
from nnx_pipeline.remat import POLICIES


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the layers run over the `stage` axis of the mesh.

    `num_microbatches=None` means as many as fill the pipeline: forwarding_delay · stages, and one
    on a mesh without stages. What a model computes does not depend on their number, but for the
    router's load-balance loss, which is that of each microbatch: where it counts
    (`train.load_balance_weight`) and the mesh has stages, give the number. With a
    `forwarding_delay` of 2 activations travel beside the work of a tick, and the bubble doubles.
    A circular schedule with one repeat is the plain pipeline. In `1f1b` each stage forwards one
    microbatch and takes another one back at each tick, so that memory does not grow with their
    number; on a mesh without stages that is the accumulation of gradients over microbatches.

    `fsdp_gather` is when a stage gathers weights that are stored apart along fsdp: at each use;
    once per step, which holds them all gathered and their gradients whole; or repeat by repeat, the
    next one while the present one is in use (`prefetch`), which holds two repeats of both (with one
    repeat it is the same as once per step). `backward` is how the
    circular schedule is differentiated: by JAX, or visit by visit with one gradient buffer per
    parameter (`accumulate`); None means the former unless weights are gathered before use.

    `remat` names what the backward pass keeps beside the input of a stage at each tick, and whether
    in device or in host memory (see `remat.POLICIES`, which says what compilers make of the
    latter); with `save_decoder_layer_input` that is the input of each layer too, where a stage has
    several, and without it those are computed again, together with all layers before.

    `sharding` is the kind of axes that the commands give their meshes; a model in Python goes by
    the axes of the mesh that it is made under (`make_mesh(…, sharding=…)`).
    """

    num_microbatches: int | None = None
    num_repeats: int = 1
    schedule: Literal["circular", "1f1b"] = "circular"
    forwarding_delay: Literal[1, 2] = 1
    shift: Literal["ppermute", "slice", "pad"] = "ppermute"
    sharding: Literal["explicit", "auto"] = "explicit"
    remat: Literal[
        "full",
        "save_out_proj",
        "save_qkv_proj",
        "save_dot_except_mlp",
        "minimal",
        "qkv_proj_offloaded",
        "minimal_offloaded",
        "none",
    ] = "full"
    save_decoder_layer_input: bool = True
    fsdp_gather: Literal["use", "step", "prefetch"] = "use"
    backward: Literal["autodiff", "accumulate"] | None = None

    def __post_init__(self) -> None:
        whole(self, "num_repeats")
        if self.num_microbatches is not None:
            whole(self, "num_microbatches")
        one_of("schedule", self.schedule, ("circular", "1f1b"))
        one_of("shift", self.shift, ("ppermute", "slice", "pad"))
        one_of("forwarding_delay", self.forwarding_delay, (1, 2))
        one_of("sharding", self.sharding, ("explicit", "auto"))
        one_of("remat", self.remat, POLICIES)
        one_of("fsdp_gather", self.fsdp_gather, ("use", "step", "prefetch"))
        one_of("backward", self.backward, (None, "autodiff", "accumulate"))
        if self.fsdp_gather != "use" and self.backward == "autodiff":
            raise InputError(
                f"pipeline.fsdp_gather={self.fsdp_gather} adds gradients up over ticks, which "
                "pipeline.backward=autodiff does not; leave backward out or set it to accumulate"
            )
        one_of("save_decoder_layer_input", self.save_decoder_layer_input, (True, False))
        if self.schedule == "1f1b":
            self._check_one_f_one_b()

    def _check_one_f_one_b(self) -> None:
        for name, only in (("forwarding_delay", 1), ("backward", None)):
            if getattr(self, name) != only:
                raise InputError(
                    f"pipeline.{name}={getattr(self, name)} is for the circular schedule; "
                    f"with pipeline.schedule=1f1b leave it at {only}"
                )
        if self.num_repeats > 1 and self.fsdp_gather == "prefetch":
            raise InputError(
                "pipeline.fsdp_gather=prefetch holds the weights of two repeats that follow each "
                f"other, and with pipeline.schedule=1f1b and pipeline.num_repeats="
                f"{self.num_repeats} stages are in other repeats forward and backward; choose use "
                "or step"
            )
        if POLICIES[self.remat].offloaded:
            raise InputError(
                f"pipeline.remat={self.remat} sends values to the host, and the ring of "
                "pipeline.schedule=1f1b is in device memory, where it does not grow with the "
                "microbatches; choose a policy that saves or recomputes"
            )

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added up by the loop itself rather than by JAX."""
        if self.backward is not None:
            return self.backward == "accumulate"
        return self.schedule == "1f1b" or self.fsdp_gather != "use"

    def microbatches_on(self, stages: int) -> int:
        """The number of microbatches on a mesh with that many stages."""
        return self.num_microbatches or stages * (self.forwarding_delay if stages > 1 else 1)
