"""One decoder layer of each kind: of Mixtral, Qwen3-MoE and DeepSeek, and of dense models."""

import functools
from typing import ClassVar

from jaxtyping import Array

from linen_compat.formats._names import is_apart
from linen_compat.modules.attention import Attention
from linen_compat.modules.feed_forward import DeepSeekMoeBlock, MlpBlock, MoeBlock
from linen_compat.modules.latent_attention import LatentAttention
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import OfModel
from nnx_pipeline import InputError, ModelConfig
from nnx_pipeline.config._remat import KEEP_ALL, Remat
from nnx_pipeline.ops._residual import add_to_stream, two_updates, update_of
from nnx_pipeline.ops._router import not_padding, router_metrics
from nnx_pipeline.pipeline import MicrobatchMean

# The names of the norms before and after a block.
_OF_ATTENTION = ("pre_self_attention_layer_norm", "post_self_attention_norm")
_OF_FEED_FORWARD = ("post_self_attention_layer_norm", "post_ffw_norm")


class _DecoderLayer(OfModel):
    """As `nnx_pipeline.DecoderLayer`, with MaxText's names."""

    remat: Remat = KEEP_ALL

    def setup(self) -> None:
        config, layout = self.config, self.layout
        before, after = (config.norm_placement in (where, "both") for where in ("before", "after"))
        if before:
            self.pre_self_attention_layer_norm = RMSNorm(config, layout)
            self.post_self_attention_layer_norm = RMSNorm(config, layout)
        if after:
            self.post_self_attention_norm = RMSNorm(config, layout)
            self.post_ffw_norm = RMSNorm(config, layout)
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.self_attention = attention(config, layout)

    def __call__(
        self,
        x: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        keys: Array | None = None,
    ) -> tuple[Array, MicrobatchMean | None]:
        """The output of the layer, and what its router reports, see `router_metrics`.

        - `x`: `[batch, seq, embed]`; the result has the same shape.
        - `positions`, `segment_ids`: `[batch, seq]` integers, as of `Attention`.
        - `keys`: `[batch, words]` for dropout (`nnx_pipeline.sharding.dropout`); None for none.
        """

        scale = self.config.residual_scale

        def attend(x: Array) -> Array:
            call = functools.partial(
                self.self_attention, positions=positions, segment_ids=segment_ids
            )
            return update_of(x, call, self._norms(_OF_ATTENTION), scale)

        def feed_forward(x: Array) -> tuple[Array, MicrobatchMean | None]:
            reported: list[MicrobatchMean | None] = []

            def call(x: Array) -> Array:
                mixed, usage = self.feed_forward(x, not_padding(segment_ids))
                reported.append(usage)
                return mixed

            return update_of(x, call, self._norms(_OF_FEED_FORWARD), scale), reported[0]

        rate, layout = self.config.dropout_rate, self.layout
        add = functools.partial(add_to_stream, keys=keys, rate=rate, layout=layout)
        return two_updates(x, attend, feed_forward, add)

    def _norms(self, names: tuple[str, str]) -> tuple[RMSNorm | None, RMSNorm | None]:
        before, after = names
        placement = self.config.norm_placement
        return (
            None if placement == "after" else getattr(self, before),
            None if placement == "before" else getattr(self, after),
        )

    def feed_forward(self, x: Array, real: Array | None) -> tuple[Array, MicrobatchMean | None]:
        """What follows attention, and what its router reports; `real` as of `MoeBlock`."""
        raise NotImplementedError


class _RoutedLayer(_DecoderLayer):
    """A decoder layer with routed experts: a `block` with the name that `experts` says."""

    experts: ClassVar[str]
    block: ClassVar[type[MoeBlock | DeepSeekMoeBlock]] = MoeBlock
    qk_norm: ClassVar[bool] = False

    def setup(self) -> None:
        _check_kind(self, qk_norm=self.qk_norm)
        super().setup()
        setattr(self, self.experts, self.block(self.config, self.layout, self.remat))

    def feed_forward(self, x: Array, real: Array | None) -> tuple[Array, MicrobatchMean]:
        mixed, usage = getattr(self, self.experts)(x, real)
        return mixed, MicrobatchMean(usage, router_metrics)


class _DenseLayer(_DecoderLayer):
    def setup(self) -> None:
        _check_kind(self)
        super().setup()
        self.mlp = MlpBlock(self.config, self.layout)

    def feed_forward(self, x: Array, real: Array | None) -> tuple[Array, None]:
        return self.mlp(x), None


class MixtralDecoderLayer(_RoutedLayer):
    """A decoder layer with routed experts; it is called as `_DecoderLayer`."""

    experts = "MoeBlock_0"


class Qwen3MoeDecoderLayer(_RoutedLayer):
    """As Mixtral's layer with QK norm, but for the name of its experts, `moe_block`."""

    experts, qk_norm = "moe_block", True


class LlamaDecoderLayer(_DenseLayer):
    """A decoder layer with a dense MLP, with or without QK norm; called as `_DecoderLayer`."""


class DeepSeekDenseLayer(_DenseLayer):
    """A decoder layer with latent attention and a dense MLP; called as `_DecoderLayer`."""


class DeepSeekMoELayer(_RoutedLayer):
    """A decoder layer with latent attention, routed and shared experts; as `_DecoderLayer`."""

    experts, block = "DeepSeekMoeBlock_0", DeepSeekMoeBlock


def layer_class(config: ModelConfig) -> type[_DecoderLayer]:
    """The class whose parameters have the names that MaxText gives a layer of this model."""
    if config.kv_lora_rank is not None and config.num_experts == 1:
        return DeepSeekDenseLayer
    if is_apart(config):
        return DeepSeekMoELayer
    if config.num_experts == 1:
        return LlamaDecoderLayer
    return Qwen3MoeDecoderLayer if config.qk_norm else MixtralDecoderLayer


def _check_kind(layer: _DecoderLayer, *, qk_norm: bool | None = None) -> None:
    """Raises InputError for a config that is for another class of layer.

    `qk_norm` is what the class with routed experts needs; None for the class without.
    """
    config, name = layer.config, type(layer).__name__
    wanted, routed = layer_class(config).__name__, qk_norm is not None
    if routed != (config.num_experts > 1):
        needs, other = ("two experts or more", "2 or more") if routed else ("num_experts=1", "1")
        raise InputError(
            f"{name} needs {needs}, and the config has num_experts={config.num_experts}; "
            f"use {wanted}, or set {'num_experts' if routed else 'it'} to {other}"
        )
    if wanted != name and "DeepSeek" in wanted + name:
        latent = "DeepSeek" in name
        raise InputError(
            f"{name} {'needs' if latent else 'has no'} latent attention or shared experts, and the "
            f"config has kv_lora_rank={config.kv_lora_rank}, num_shared_experts="
            f"{config.num_shared_experts}; use {wanted}"
        )
    if "DeepSeek" in name:
        return
    if routed and qk_norm != config.qk_norm:
        raise InputError(
            f"{name} needs qk_norm={qk_norm}, and the config has qk_norm={config.qk_norm}; "
            f"use {wanted}, or set it to {qk_norm}"
        )
