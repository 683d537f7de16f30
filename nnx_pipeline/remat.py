"""What the backward pass keeps of the forward pass, and what it computes again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

ITERATION_INPUT = "iteration_input"  # what a stage receives at a tick; always kept
LAYER_INPUT = "decoder_layer_input"
EXPERT_USAGE = "expert_usage"  # a few numbers per layer; always kept
QUERY_KEY_VALUE = ("query_proj", "key_proj", "value_proj")
OUT = "out_proj"
HIDDEN = ("mlp_gate", "mlp_up")


@dataclass(frozen=True)
class Remat:
    """Keeps the values of these names beside the inputs of a checkpoint; None keeps everything.

    The names are those that the modules give (`named`): the constants of this file.
    """

    saved: tuple[str, ...] | None = ()

    def checkpoint(
        self, function: Callable[..., Any], *, also: tuple[str, ...] = (), in_scan: bool = False
    ) -> Callable[..., Any]:
        """The function, recomputed in the backward pass but for what is saved.

        also: names saved besides. in_scan: the function is the whole body of a scan, where XLA has
        nothing to merge the recomputation with, so that no barrier against that is needed.
        """
        if self.saved is None:
            return function
        policy = jax.checkpoint_policies.save_only_these_names(*self.saved, *also)
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)


# As MaxText calls them. `minimal` keeps the result of every projection, so that no weight is
# multiplied twice; the scores of attention are computed again by all but `none`.
POLICIES: dict[str, Remat] = {
    "full": Remat(),
    "save_out_proj": Remat((OUT,)),
    "save_qkv_proj": Remat(QUERY_KEY_VALUE),
    "save_dot_except_mlp": Remat((*QUERY_KEY_VALUE, OUT)),
    "minimal": Remat((*QUERY_KEY_VALUE, OUT, *HIDDEN)),
    "none": Remat(None),
}
FULL, KEEP_ALL = POLICIES["full"], POLICIES["none"]

named = checkpoint_name
