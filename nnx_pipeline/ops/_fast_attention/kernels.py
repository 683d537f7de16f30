"""The kinds of attention that a config names, and how the kernels of a device enter a layer."""

import functools
from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float, Int

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import ambient_platform, entry_axes
from nnx_pipeline.ops._attention import Options, dot_product_attention, in_groups, out_of_groups
from nnx_pipeline.ops._fast_attention import cudnn, splash
from nnx_pipeline.ops._fast_attention.chunked import Tiling, attend_by_tiles
from nnx_pipeline.ops._per_device import differentiable
from nnx_pipeline.sharding.layout import P, mesh_sizes

TILE = 512  # queries and keys of a tile of `chunked`
# Up to so many tokens `auto` takes `dot_product` where it does not take `flash`. For one layer of
# Mixtral 8x7B at 4096 tokens its estimated time is 0.7 times that of `chunked` on a TPU v5p (the
# estimate for an H100 is too long for `chunked`), and its temp 3.2 times as much there, and 2.5
# times on an H100. Its program grows with the sequence.
SHORT = 4096
REFUSAL = (
    "attention by a kernel has first derivatives in reverse mode only; "
    "set model.attention='dot_product' for second derivatives and for forward mode"
)

Heads = Float[Array, "batch seq heads head_dim"]
KeyHeads = Float[Array, "batch seq kv_heads head_dim"]
ValueHeads = Float[Array, "batch seq kv_heads value_dim"]
_Output = Float[Array, "batch seq heads value_dim"]
Segments = Int[Array, "batch seq"] | None
# (query, key, value, segment ids, *, grouped, options) to the output of the heads
Kernel = Callable[..., Array]


def chunked_attention(
    query: Heads,
    key: KeyHeads,
    value: ValueHeads,
    segment_ids: Segments = None,
    *,
    grouped: P,
    options: Options = Options(),
) -> _Output:
    """`dot_product_attention` in memory linear in the sequence, for tiles of `block` tokens."""
    tiling = Tiling(options.window, options.block or TILE, options.soft_cap)
    kernel = functools.partial(attend_by_tiles, tiling)
    query = in_groups(query, key.shape[2], scale=options.scale, grouped=grouped)
    return _on_devices(kernel, (query, key, value, segment_ids), grouped)


def flash_attention(
    query: Heads,
    key: KeyHeads,
    value: ValueHeads,
    segment_ids: Segments = None,
    *,
    grouped: P,
    options: Options = Options(),
) -> _Output:
    """`dot_product_attention` by the platform's kernel: splash on a TPU, cuDNN on an NVIDIA GPU."""
    if options.block is not None:
        raise InputError(
            "model.attention='flash' is a kernel with blocks of its own, and got attention_block="
            f"{options.block}; leave that out, or set model.attention='chunked'"
        )
    platform, masks = ambient_platform(), list[Array]()
    if not options.interpret:
        check_platform("flash", platform)
    kernel: Callable[..., Array]
    if options.interpret or platform == "tpu":
        splash.check_splash(query.shape[1], query.dtype)
        attention = splash.Splash(options.window, options.soft_cap, options.interpret)
        masks, structure = attention.masks(query.shape[1], query.shape[2] // key.shape[2])
        kernel = functools.partial(attention.attend, structure)
    else:
        packed, head_dims = segment_ids is not None, (query.shape[3], value.shape[3])
        cudnn.check_cudnn(head_dims, query.dtype, packed=packed, soft_cap=options.soft_cap)
        kernel = cudnn.CuDNN(options.window)
    query = in_groups(query, key.shape[2], scale=options.scale, grouped=grouped)
    return _on_devices(kernel, (query, key, value, segment_ids), grouped, masks)


def auto_attention(query: Heads, *others: Array | None, grouped: P, options: Options) -> Array:
    kind = chosen("auto", query.shape[1], query.dtype)
    return KERNELS[kind](query, *others, grouped=grouped, options=options)


# What `model.attention` may be.
KERNELS: dict[str, Kernel] = {
    "dot_product": dot_product_attention,
    "chunked": chunked_attention,
    "flash": flash_attention,
    "auto": auto_attention,
}


def check_platform(kind: str, platform: str) -> None:
    if kind == "flash" and platform not in ("tpu", "gpu"):
        raise InputError(
            "model.attention='flash' is a kernel for TPUs and NVIDIA GPUs, and the platform is "
            f"{platform}; set model.attention='chunked', which computes the same"
        )


def chosen(kind: str, length: int, dtype: jax.typing.DTypeLike) -> str:
    if kind != "auto":
        return kind
    if ambient_platform() == "tpu" and splash.Splash.obstacle(length, dtype) is None:
        return "flash"
    return "dot_product" if length <= SHORT else "chunked"


def _on_devices(
    kernel: Callable[..., Array],
    arrays: tuple[Array, Array, Array, Array | None],
    grouped: P,
    whole: Sequence[Array] = (),
) -> Array:
    # `arrays` are query in groups, key, value and segment ids; every device has those of `whole`
    # whole. `kernel` gets no segment ids where there are none.
    keys = P(*grouped[:3], None)
    specs = [grouped, keys, keys, P(grouped[0], None)]
    present = [array for array in arrays if array is not None]
    specs = [*specs[: len(present)], *(P() for _ in whole)]
    shards = tuple(axis for entry in grouped for axis in entry_axes(entry) if axis in mesh_sizes())
    attend = differentiable(kernel, specs, grouped, shards=shards, refusal=REFUSAL)
    return out_of_groups(attend(*present, *whole), grouped)
