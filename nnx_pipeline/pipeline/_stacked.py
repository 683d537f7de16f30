"""The layers of a pipeline as the loops read them: their stacks, numbers and copies."""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.pipeline._stack import Stack
from nnx_pipeline.pipeline._zero1 import GradientShards, Zero1Layers, gradient_shards
from nnx_pipeline.pipeline.gather import FsdpGather, gathered_axes
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.pipeline.stage.state import WithState, parted
from nnx_pipeline.sharding.layout import Layout, P, mesh_sizes, place, with_layout


@dataclass(frozen=True)
class StackedLayers:
    """The form in which a loop reads layers, which may be `unrolled`, and gathers their weights."""

    config: PipelineConfig
    stack: Stack
    layout: Layout
    weights: WeightOptions
    unrolled: bool

    def stacked(self, layers: PyTree) -> PyTree:
        """For each kind, or each layer of a stage if they are `unrolled`, stack and numbers."""
        # Both have an axis of copies along the mesh axes of `_copied`.
        if self.weights.zero1:
            shards = self.shards(layers, skip=0, axis=2)
            layers = shards.copies(layers) if self._copied else shards.of(layers)
        pairs = tuple(
            (of_kind, self._numbers(kind)) for kind, of_kind in enumerate(self.kinds(layers))
        )
        if not self.unrolled:
            return pairs
        return [self._layer_at(pairs, at) for at in range(self.stack.per_stage)]

    def _layer_at(self, pairs: tuple[PyTree, ...], at: int) -> PyTree:
        at, kind = divmod(at, self.stack.kinds)
        axis = self._layer_axis
        return jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, at, axis, False), pairs[kind])

    def copies_of_layer(self, layer: PyTree) -> PyTree:
        return self.shards(layer, skip=3, axis=0).copies(layer)

    def kinds(self, layers: PyTree, layout: Layout | None = None) -> list[PyTree]:
        """The stacked layers of each kind, with another attribute `layout` if it is given."""
        if layout is not None and isinstance(layers, Zero1Layers):
            layers = dataclasses.replace(layers, whole=with_layout(layers.whole, layout))
        elif layout is not None:
            layers = with_layout(layers, layout)
        if self.stack.kinds == 1:
            return [layers]
        if isinstance(layers, Zero1Layers):
            pairs = zip(layers.whole, layers.shards, strict=True)
            return [Zero1Layers(whole, shards) for whole, shards in pairs]
        return [*layers]

    @property
    def _layer_axis(self) -> int:
        return 3 if self._copied else 2

    @property
    def _copied(self) -> tuple[str, ...]:
        """The mesh axes of ZeRO-1 along which the parameters are copied before the loop."""
        # None where the loop itself gathers weights: it then gathers the shards of ZeRO-1, and adds
        # up gradients as shards.
        copies = self.layout.axes("copy")
        return copies if copies == self.weights.zero1 and not gathered_axes(self.config) else ()

    def _numbers(self, kind: int) -> Array:
        numbers = jnp.asarray(self.stack.numbers(kind))
        if self._copied:
            copies = math.prod(mesh_sizes()[axis] for axis in self._copied)
            numbers = jnp.repeat(numbers[:, :, None], copies, axis=2)
        return place(numbers, self._numbers_spec(stacked=True))

    def _numbers_spec(self, *, stacked: bool) -> P:
        copies = (self._copied,) if self._copied else ()
        return P(*self.layout.spec(None, "stage"), *copies, *[None] * stacked)

    def fsdp_gather(self, layers: PyTree) -> FsdpGather:
        """Which axes of the arrays of `stacked` are gathered, and when."""
        copies, over = self.layout.axes("copy"), gathered_axes(self.config)
        if copies == self._copied:
            return FsdpGather(prefetch=self.config.prefetches)
        unrolled, at = self.unrolled, self._layer_axis
        layers, _ = parted(layers)
        number = self._numbers_spec(stacked=not unrolled)
        of_kinds = []
        for of_kind in self.kinds(layers):
            specs = self.shards(of_kind, skip=0, axis=2).sharded
            if unrolled:
                specs = tuple(P(*spec[:at], *spec[at + 1 :]) for spec in specs)
            of_kinds.append((*specs, number))
        return FsdpGather(
            specs=sum(of_kinds, ()) * (self.stack.shape[2] if unrolled else 1),
            copies=copies,
            over=(*over, *self.weights.zero1),
            dtype=self.weights.dtype if over else None,
            prefetch=self.config.prefetches,
        )

    def shards(self, layers: PyTree, *, skip: int, axis: int) -> GradientShards:
        whole = layers.whole if isinstance(layers, Zero1Layers) else layers
        weights = self.weights
        return gradient_shards(
            whole, self.layout, weights.zero1, skip=skip, axis=axis, dtype=weights.grad_dtype
        )


def check_layer_state(layers: PyTree, config: PipelineConfig, layout: Layout, stages: int) -> None:
    if not isinstance(layers, WithState):
        return
    if config.batch_split > 1:
        raise InputError(
            "the layers have state, such as running statistics, and pipeline.batch_split="
            f"{config.batch_split} calls them several times per microbatch; set it to 1"
        )
    default = config.microbatches_on(stages)
    if config.num_microbatches is None and default > 1:
        raise InputError(
            "the layers have state, such as running statistics, which depends on the number of "
            "microbatches, and pipeline.num_microbatches=None makes that depend on the mesh "
            f"(here it is {default}); set pipeline.num_microbatches={default}, on every mesh"
        )
    if layout.axes("copy"):
        reason, cure = _why_in_copies(config, layout.axes("copy"))
        axes = " and ".join(layout.axes("copy"))
        raise InputError(
            "the layers have state, such as running statistics, and run in one copy per device "
            f"along {axes}, each on a part of a microbatch, because of {reason}; set {cure}, or "
            f"take a mesh in which {axes} is 1"
        )


def _why_in_copies(config: PipelineConfig, axes: tuple[str, ...]) -> tuple[str, str]:
    """The option by which layers run in copies along these axes, and what to set instead."""
    if set(axes) & set(gathered_axes(config)):
        return f"pipeline.fsdp_gather={config.fsdp_gather}", "pipeline.fsdp_gather=use"
    if not config.accumulates:
        return "train.shard_optimizer_over_data=true", "train.shard_optimizer_over_data=false"
    if config.backward is not None:
        return "pipeline.backward=accumulate", "pipeline.backward=autodiff"
    if config.schedule == "1f1b":
        return "pipeline.schedule=1f1b", "pipeline.schedule=circular"
    return f"pipeline.fsdp_gather={config.fsdp_gather}", "pipeline.fsdp_gather=use"
