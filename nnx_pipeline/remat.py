"""What the backward pass keeps of the forward pass, where, and what it computes again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from nnx_pipeline.errors import InputError

ITERATION_INPUT = "iteration_input"  # what a stage receives at a tick; always kept
LAYER_INPUT = "decoder_layer_input"
LAYER_METRICS = "layer_metrics"  # a few numbers per layer; always kept
QUERY_KEY_VALUE = ("query_proj", "key_proj", "value_proj")
OUT = "out_proj"
HIDDEN = ("mlp_gate", "mlp_up")


@dataclass(frozen=True)
class Remat:
    """Keeps the values of these names beside the inputs of a checkpoint; None keeps everything.

    The names are those that the modules give (`named`): the constants of this file.

    saved: kept in device memory. offloaded: kept in host memory, sent there as soon as they are
    computed and fetched in the backward pass; a compiler without host memory of its own (CPU) keeps
    them where they are. Raises InputError when the two contradict each other.
    """

    saved: tuple[str, ...] | None = ()
    offloaded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.saved is None and self.offloaded:
            raise InputError(
                f"saved=None keeps everything on the device, and offloaded={self.offloaded} is to "
                "leave it; name what to save"
            )
        both = sorted({*(self.saved or ())} & {*self.offloaded})
        if both:
            raise InputError(f"saved and offloaded both name {both}; keep each name in one of them")

    def checkpoint(
        self, function: Callable[..., Any], *, also: tuple[str, ...] = (), in_scan: bool = False
    ) -> Callable[..., Any]:
        """The function, recomputed in the backward pass but for what is kept.

        also: names saved besides, unless they are offloaded. in_scan: the function is the whole
        body of a scan, where XLA has nothing to merge the recomputation with, so that no barrier
        against that is needed.
        """
        policy = self.policy(also=also)
        if policy is None:
            return function
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)

    def policy(self, *, also: tuple[str, ...] = ()) -> Callable[..., Any] | None:
        """The policy of `checkpoint` for a checkpoint of one's own; None where there is none."""
        if self.saved is None:
            return None
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*self.saved, *(n for n in also if n not in self.offloaded)],
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )


# As MaxText calls them. `minimal` keeps the result of every projection that the backward pass
# reads, so that none is computed again; the scores of attention are, by all but `none`.
#
# Offloading works from a loop that is not inside another one of several turns. Out of a loop in a
# loop XLA brings no value to the host: the NVIDIA compiler fails ("Expected instruction to have
# shape equal to"), and the TPU compiler keeps it on the device after all. So under a policy that
# offloads the layers of a stage are in no loop of their own, and compile time grows with them.
# Experts' hidden units come out of the loop over experts; `minimal_offloaded` keeps those on the
# device.
#
# benchmarks/results/remat_policies.md has what each of them holds at `mixtral-small`: on a TPU v5p
# `full` 170 MB of heap, `save_qkv_proj` 220, `qkv_proj_offloaded` 188 and 40 on the host, `minimal`
# 886.
POLICIES: dict[str, Remat] = {
    "full": Remat(),
    "save_out_proj": Remat((OUT,)),
    "save_qkv_proj": Remat(QUERY_KEY_VALUE),
    "save_dot_except_mlp": Remat((*QUERY_KEY_VALUE, OUT)),
    "minimal": Remat((*QUERY_KEY_VALUE, OUT, *HIDDEN)),
    "qkv_proj_offloaded": Remat(offloaded=QUERY_KEY_VALUE),
    "minimal_offloaded": Remat(HIDDEN, offloaded=(*QUERY_KEY_VALUE, OUT)),
    "none": Remat(None),
}
FULL, KEEP_ALL = POLICIES["full"], POLICIES["none"]

named = checkpoint_name
