"""Attention by NVIDIA's cuDNN, on what one device holds.

It was compiled for an H100 without one (JAX 0.10.2, `nvidia-cudnn-cu13` 9.28; figures are in
`benchmarks/results/attention_memory.md`), and has never run.
"""

import ctypes
import importlib.util
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from nnx_pipeline.lab.errors import InputError, install

_DTYPES = ("bfloat16", "float16")
WIDEST = 128  # head_dim; only Hopper and later have 256, which is not known without the device


@dataclass(frozen=True)
class CuDNN:
    """cuDNN's attention with a causal mask, by `jax.nn.dot_product_attention`."""

    # Packed sequences are refused: what cuDNN takes is the offset of each segment, a layout of its
    # own, and a mask as an array would be quadratic in the sequence.
    window: int | None = None

    def __call__(
        self,
        query: Float[Array, "batch seq kv_heads queries_per_key head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
    ) -> Float[Array, "batch seq kv_heads queries_per_key head_dim"]:
        """softmax(query · keyᵀ, masked) · value of scaled queries, with cuDNN's own derivative."""
        batch, length, kv_heads, queries, head_dim = query.shape
        mixed = jax.nn.dot_product_attention(
            query.reshape(batch, length, kv_heads * queries, head_dim),
            key,
            value,
            scale=1.0,
            is_causal=True,
            local_window_size=None if self.window is None else (self.window - 1, 0),
            implementation="cudnn",
        )
        return mixed.reshape(query.shape)


def check_cudnn(
    head_dims: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    *,
    packed: bool,
    soft_cap: float | None = None,
) -> None:
    """Refuses what cuDNN cannot compute; widths of a query or key head, and of a value head."""
    (head_dim, value_dim), reason = head_dims, None
    name = jax.numpy.dtype(dtype).name
    if packed:
        reason = "it gets no segment ids here; give batches without segment_ids (--end-token none)"
    elif soft_cap is not None:
        reason = f"it has no model.attention_soft_cap={soft_cap}; set that to None"
    elif name not in _DTYPES:
        reason = f"model.dtype={name} is no dtype of it; take bfloat16 or float16"
    elif head_dim != value_dim:
        reason = (
            f"query heads of {head_dim} and value heads of {value_dim}, as of multi-head latent "
            "attention, are not given to it; take heads of one width"
        )
    elif head_dim % 8 or head_dim > WIDEST:
        reason = f"model.head_dim={head_dim} is not a multiple of 8 up to {WIDEST}; change it"
    elif not _is_installed():
        reason = f"it is not installed; {install('cudnn')}"
    if reason:
        raise InputError(
            f"model.attention='flash' is cuDNN on an NVIDIA GPU: {reason}, or set "
            "model.attention='chunked'"
        )


def _is_installed() -> bool:
    try:
        if importlib.util.find_spec("nvidia.cudnn") is not None:
            return True
    except ModuleNotFoundError:  # no wheel of NVIDIA at all
        pass
    try:
        ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return False
    return True
