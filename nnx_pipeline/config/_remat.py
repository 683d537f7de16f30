"""Remat policies: what the backward pass keeps, in which memory, and what it recomputes."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from nnx_pipeline.lab.errors import InputError, nearest, one_of

if TYPE_CHECKING:
    from jaxtyping import Array

# Names that the modules give to values (see `named`), for a policy to refer to.
ITERATION_INPUT = "iteration_input"  # what a stage receives at a tick; kept if it is not offloaded
LAYER_INPUT = "decoder_layer_input"
LAYER_METRICS = "layer_metrics"  # a few numbers per layer; always kept
QUERY_KEY_VALUE = ("query_proj", "key_proj", "value_proj")
OUT = "out_proj"
HIDDEN = ("mlp_gate", "mlp_up")
AT = "@"  # between a name and the number of a group of layers, from 1 on

_GROUP: contextvars.ContextVar[int] = contextvars.ContextVar("group", default=0)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
Policy = Callable[..., bool]  # of a primitive and its values to what becomes of them


def parted(name: str) -> tuple[str, str]:
    """A name and the number of its group, "" for all layers."""
    value, _, group = name.partition(AT)
    return value, group


@dataclass(frozen=True)
class Remat:
    """Which named values (see `named`) a checkpoint keeps in addition to its inputs.

    - `saved`: names kept in device memory; None keeps every value, named or not.
    - `offloaded`: names kept in host memory from where they are computed until the backward pass. A
      compiler without a separate host memory (CPU) leaves them where they are.
    """

    saved: tuple[str, ...] | None = ()
    offloaded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.saved is None and self.offloaded:
            raise InputError(
                f"saved=None keeps everything on the device, which contradicts "
                f"offloaded={self.offloaded}; name what to save"
            )
        kept, away = (self.saved or ()), self.offloaded
        # A name of all layers is that of each group too.
        both = {name for name in kept if {name, parted(name)[0]} & {*away}}
        both |= {name for name in away if parted(name)[0] in kept}
        if both:
            raise InputError(
                f"saved and offloaded both name {sorted(both)}; keep each name in one of them"
            )

    def checkpoint(
        self,
        function: Callable[_Args, _Result],
        *,
        also: tuple[str, ...] = (),
        in_scan: bool = False,
    ) -> Callable[_Args, _Result]:
        """The function, recomputed in the backward pass except for the values that are kept.

        - `also`: names saved in addition to the policy's own, unless those are offloaded.
        - `in_scan`: whether the function is the whole body of a scan. XLA then has nothing to merge
          the recomputation with, so that no barrier against merging (`prevent_cse`) is needed.
        """
        import jax

        policy = self.policy(also=also)
        if policy is None:
            return function
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)

    def policy(self, *, also: tuple[str, ...] = ()) -> Policy | None:
        """What `checkpoint` hands to `jax.checkpoint`; None if everything is kept."""
        import jax

        if self.saved is None:
            return None
        policy: Policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*self.saved, *(n for n in also if n not in self.offloaded)],
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return policy


# The names are MaxText's. `minimal` keeps the result of every projection that the backward pass
# reads, so that no projection is computed again. Attention scores are computed again under every
# policy.
#
# XLA can offload a value from a loop only if that loop is not inside another loop of more than one
# iteration. From a nested loop no value reaches the host: the NVIDIA compiler fails ("Expected
# instruction to have shape equal to"), and the TPU compiler keeps the value on the device. So under
# a policy that offloads, the layers of a stage are unrolled instead of scanned, and compile time
# grows with their number. The experts' hidden units may be computed in a loop over groups of
# experts; `minimal_offloaded` keeps those on the device. 1F1B keeps its residuals in a ring that
# its loop carries; both compilers carry such a ring in host memory, too, and move a slot at a time:
# for `mixtral-small` in 8 microbatches on a TPU v5p, 224 MB of heap and 40 on the host with
# `qkv_proj_offloaded`, 265 of heap with `save_qkv_proj`; for `tiny` the heap is larger with it.
#
# benchmarks/results/remat_policies.md lists the memory that each policy needs at `mixtral-small`.
# `inputs_offloaded` is for models whose inputs of layers are much of the heap: of Llama2-7B on four
# TPU v5p, 21.9 GB of heap with `full`, and 15.6 and 6.5 on the host with it, for an estimated step
# that is 4.6 % longer. For `mixtral-small` the heap is larger with it.
POLICIES: dict[str, Remat] = {
    "full": Remat(),
    "save_out_proj": Remat((OUT,)),
    "save_qkv_proj": Remat(QUERY_KEY_VALUE),
    "save_dot_except_mlp": Remat((*QUERY_KEY_VALUE, OUT)),
    "minimal": Remat((*QUERY_KEY_VALUE, OUT, *HIDDEN)),
    "inputs_offloaded": Remat(offloaded=(LAYER_INPUT,)),
    "qkv_proj_offloaded": Remat(offloaded=QUERY_KEY_VALUE),
    "minimal_offloaded": Remat(HIDDEN, offloaded=(*QUERY_KEY_VALUE, OUT)),
    "none": Remat(None),
}
FULL, KEEP_ALL = POLICIES["full"], POLICIES["none"]

# Names that a policy which is spelled out can have. The input of a layer is kept by another field,
# `save_decoder_layer_input`.
KEPT = (*QUERY_KEY_VALUE, OUT, *HIDDEN)
OFFLOADED = (*KEPT, LAYER_INPUT)
_KNOWN = {"keep": KEPT, "offload": OFFLOADED}


def remat_of(text: str) -> Remat:
    """The policy that `pipeline.remat` stands for: one of `POLICIES` by its name, or one that is
    spelled out, such as `keep:out_proj+mlp_up/offload:query_proj`.

    Raises InputError for an unknown policy, and for names that cannot be kept or offloaded.
    """
    if isinstance(text, str) and text.partition(":")[0] == "auto":
        raise InputError(
            f"pipeline.remat={text}: what to keep is named here, not searched; nnx-pipeline fit … "
            f"--over remat --limit {text.partition(':')[2] or '80GB'} finds it"
        )
    if not isinstance(text, str) or ":" not in text:
        one_of("remat", text, POLICIES)
        return POLICIES[text]
    names: dict[str, tuple[str, ...]] = {}
    for part in text.split("/"):
        word, _, joined = part.partition(":")
        if word not in _KNOWN or word in names:
            raise InputError(
                f"pipeline.remat={text}: {part!r} is not of the form keep:NAME+NAME or "
                "offload:NAME+NAME, each once; write for example "
                f"keep:{OUT}/offload:{LAYER_INPUT}"
            )
        names[word] = tuple(dict.fromkeys(joined.split("+")))
        for name, group in map(parted, names[word]):
            if (group and name not in KEPT) or group == "0" or not f"{group}0".isdecimal():
                raise InputError(
                    f"pipeline.remat={text}: {name}{AT}{group} is not a group of layers; write "
                    f"the name of a value with a number from 1 on, for example {OUT}{AT}1"
                )
            if name not in _KNOWN[word]:
                cure = nearest(name, _KNOWN[word])
                raise InputError(f"pipeline.remat={text}: {word} has no {name!r}; {cure}")
    return Remat(names.get("keep", ()), names.get("offload", ()))


def of_group(function: Callable[_Args, _Result], group: int) -> Callable[_Args, _Result]:
    """The function, whose named values have the name of their group of layers too."""

    # A function of its own for each group, because JAX keeps what it traced of one.
    @functools.wraps(function)
    def call(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        token = _GROUP.set(group)
        try:
            return function(*args, **options)
        finally:
            _GROUP.reset(token)

    return call


def spelled_out(remat: Remat) -> str:
    """The inverse of `remat_of`: the name of a policy that has one, else its names."""
    for name, known in POLICIES.items():
        if known == remat:
            return name
    parts = {"keep": remat.saved or (), "offload": remat.offloaded}
    return "/".join(f"{word}:{'+'.join(names)}" for word, names in parts.items() if names)


def named(x: Array, name: str) -> Array:
    from jax.ad_checkpoint import checkpoint_name

    result: Array = checkpoint_name(x, name)
    if group := _GROUP.get():
        result = checkpoint_name(result, f"{name}{AT}{group}")
    return result
