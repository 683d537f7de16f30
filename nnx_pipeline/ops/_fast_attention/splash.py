"""JAX's splash attention, a kernel for TPUs, on what one device holds."""

import functools
from dataclasses import dataclass

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float

from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.ops._fast_attention.chunked import tiles_needed

LANES = 128  # a block of keys is a multiple of what a TPU's vector unit reads at a time
_BLOCKS = (512, 384, 256, LANES)  # of queries and of keys; the first that divides the sequence
# Matrix products per tile of scores, over the widths of keys and of values: scores, and
# results; scores and gradient of keys, and gradients of weights and values; scores and gradient of
# queries, and gradient of weights.
_PRODUCTS = {"splash_mqa_fwd": (1, 1), "splash_mqa_dkv": (2, 2), "splash_mqa_dq": (2, 1)}


@dataclass(frozen=True)
class Splash:
    """Splash attention, without tiles in which no query may read a key."""

    window: int | None = None
    cap: float | None = None
    interpret: bool = False

    @staticmethod
    def obstacle(length: int, dtype: jax.typing.DTypeLike) -> str | None:
        """Why the kernel cannot be compiled, with the cure; None if it can."""
        if length % LANES:
            return (
                f"a sequence of {counted(length, 'token')} does not divide into blocks of {LANES}; "
                f"take a multiple of {LANES}"
            )
        if jax.numpy.dtype(dtype) == jax.numpy.float16:
            return "model.dtype=float16 is no dtype of the kernel; take bfloat16 or float32"
        return None

    def masks(self, length: int, queries: int) -> tuple[list[Array], jax.tree_util.PyTreeDef]:
        """The arrays of the kernel, which say what its tiles are, and their structure."""
        # They are arguments of the function of one device: see `chunked.computed_tiles`.
        # Importing Pallas takes a second.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        block, shape = _block(length), (length, length)
        mask: splash.Mask = splash.CausalMask(shape)
        if self.window is not None:
            mask = splash.LocalMask(shape, (self.window - 1, 0), 0)
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        kernel = splash.make_splash_mqa(
            splash.MultiHeadMask([mask] * queries),
            block_sizes=sizes,
            attn_logits_soft_cap=self.cap,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        return jax.tree.flatten(kernel)

    def attend(
        self,
        structure: jax.tree_util.PyTreeDef,
        query: Float[Array, "batch seq kv_heads queries_per_key head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads value_dim"],
        *rest: Array,
    ) -> Float[Array, "batch seq kv_heads queries_per_key value_dim"]:
        """softmax(query · keyᵀ, masked) · value of scaled queries, with a derivative of its own."""
        # `rest` are segment ids, if there are any, and the arrays of `masks`.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        at = len(rest) - structure.num_leaves
        segment_ids, kernel = (rest[0] if at else None), jax.tree.unflatten(structure, rest[at:])

        def one_row(query: Array, key: Array, value: Array, ids: Array | None) -> Array:
            segments = None if ids is None else splash.SegmentIds(ids, ids)
            mixed: Array = jax.vmap(functools.partial(kernel, segment_ids=segments))(
                query, key, value
            )
            return mixed

        with set_xla_metadata(**self.stated(query, value)):
            mixed = jax.vmap(one_row)(
                query.transpose(0, 2, 3, 1, 4),
                key.swapaxes(1, 2),
                value.swapaxes(1, 2),
                segment_ids,
            )
        return mixed.transpose(0, 3, 1, 2, 4)

    def stated(self, query: Array, value: Array) -> dict[str, str]:
        """What each kernel says of its cost, by its name: it says nothing itself."""
        # A tile counts in full, even if the mask leaves a part of the tile out.
        batch, length, kv_heads, queries, head_dim = query.shape
        block = _block(length)
        tiles = batch * kv_heads * queries * len(tiles_needed(length, block, self.window))
        value_dim = value.shape[-1]
        # Each tile reads its keys and values; all else is read or written about once per query.
        per_tile = tiles * block * (head_dim + value_dim)
        size = query.dtype.itemsize * (per_tile + query.size // head_dim * (head_dim + value_dim))
        return {
            name: f"flops={2 * tiles * block**2 * (of_key * head_dim + of_value * value_dim)} "
            f"bytes_accessed={size}"
            for name, (of_key, of_value) in _PRODUCTS.items()
        }


def _block(length: int) -> int:
    return next(size for size in _BLOCKS if length % size == 0)


def check_splash(length: int, dtype: jax.typing.DTypeLike) -> None:
    reason = Splash.obstacle(length, dtype)
    if reason:
        raise InputError(
            f"model.attention='flash' is splash attention on a TPU: {reason}, or set "
            "model.attention='chunked'"
        )
