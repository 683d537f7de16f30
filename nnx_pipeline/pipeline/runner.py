"""Runs stacked layers, in a pipeline or one after the other, for both NNX and Linen."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.errors import InputError, divides
from nnx_pipeline.mesh import ambient_mesh
from nnx_pipeline.pipeline.batches import Batches
from nnx_pipeline.pipeline.circular.run import run_pipeline
from nnx_pipeline.pipeline.layers import with_keys
from nnx_pipeline.pipeline.metrics import given_out, over_layers
from nnx_pipeline.pipeline.one_f_one_b.run import run_one_f_one_b
from nnx_pipeline.pipeline.one_f_one_b.state import Inputs, ModelEnds, Weights
from nnx_pipeline.pipeline.options import Accumulation, LoopOptions, WeightOptions
from nnx_pipeline.pipeline.parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.schedule import (
    CircularSchedule,
    OneForwardOneBackward,
    Schedule,
    make_schedule,
)
from nnx_pipeline.pipeline.stage.layers import LayersInTurn, Side, call_layer
from nnx_pipeline.pipeline.weights.gathered import WeightGathering
from nnx_pipeline.pipeline.weights.zero1 import GradientShards, Zero1Layers, gradient_shards
from nnx_pipeline.remat import LAYER_INPUT, LAYER_METRICS, POLICIES
from nnx_pipeline.sharding import Layout, P, mesh_sizes, place, with_layout


@dataclass(frozen=True)
class Runner:
    """Runs the layers of a pipeline without owning them; `make_runner` makes one.

    The layers that its methods take are one callable pytree of variables `[repeats, stages, layers
    per stage, …]` with `logical_axes`, as `make_layers` makes it. With ZeRO-1 it is `Zero1Layers`,
    which holds the layers as they are stored and the shards that the gradient is computed for.

    - `config`: how the layers run over the stages.
    - `num_layers`: the number of layers of the whole model.
    - `num_stages`: the size of the mesh axis `stage`.
    - `layout`: that of the activations, with an axis of copies where the layers run in copies.
    - `weights`: as for `CircularPipeline`; mesh axes that do not shard the batch, or have size 1
      on the ambient mesh, have been removed from its `zero1`.
    - `parts`: pieces of the loop that an experiment exchanges.
    """

    config: PipelineConfig
    num_layers: int
    num_stages: int
    layout: Layout
    weights: WeightOptions
    parts: LoopParts

    @property
    def stack(self) -> tuple[int, int, int]:
        """The sizes of a parameter's first axes: (repeats, stages, layers per stage)."""
        visits = self.num_stages * self.config.num_repeats
        return self.config.num_repeats, self.num_stages, self.num_layers // visits

    @property
    def layers_per_stage(self) -> int:
        """How many consecutive layers a stage applies each time a microbatch visits it."""
        return self.stack[2]

    def run(
        self, layers: Any, x: Array, side: Side, *, keys: Array | None = None
    ) -> tuple[Array, PyTree]:
        """Applies all layers to activations; returns the result and the metrics of all layers.

        - `layers`: the stacked layers.
        - `x`: activations laid out by `batches.arrange`; the result has the same layout.
        - `side`: what a layer reads beside x, `[batch, …]` each, by the names of its arguments.
        - `keys`: for dropout, as `ops.dropout.sequence_keys` makes them; None leaves it out.
        """
        side = with_keys(side, keys)
        if not self.in_microbatches:
            side = jax.tree.map(self.batches.arrange, side)
            return self._run_whole_batch(layers, x, side)
        return run_pipeline(
            self._apply_stage,
            self._stack(layers),
            x,
            jax.tree.map(self.batches.on_every_stage, side),
            schedule=self.schedule("circular"),
            options=self._options(layers),
        )

    def loss(
        self,
        layers: Any,
        ends: ModelEnds,
        inputs: tuple[PyTree, PyTree],
        side: Side,
        *,
        keys: Array | None = None,
        metric_weights: PyTree = None,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of the whole model by 1F1B, and its two parts; see `run_one_f_one_b`.

        - `layers`: the stacked layers.
        - `ends`: what comes before and after the layers. Both functions work on one microbatch;
          its activations have the axes of `batches.axes` without the first.
        - `inputs`: what `ends.enter` and what `ends.leave` reads, each `[batch, …]`.
        - `side`, `keys`: as in `run`.
        - `metric_weights`: the weight of each metric of a layer in the loss.
        """
        arrays = (inputs[0], with_keys(side, keys), inputs[1])
        return run_one_f_one_b(
            ends.enter,
            self._apply_stage,
            ends.leave,
            Weights(ends.enter_weights, self._stack(layers), ends.leave_weights),
            Inputs(*jax.tree.map(self.batches.on_every_stage, arrays)),
            schedule=self.schedule("1f1b"),
            metric_weights=metric_weights,
            options=self._options(layers),
        )

    @property
    def batches(self) -> Batches:
        """How a batch is cut and laid out on the ambient mesh.

        Raises InputError on a mesh with another number of stages, and when the number of
        microbatches does not fit the stages.
        """
        on_mesh = ambient_mesh().stage
        if on_mesh != self.num_stages:
            raise InputError(
                f"the pipeline was made for {self.num_stages} stages and the mesh has "
                f"stage={on_mesh}; make and call it under the same mesh"
            )
        if self.in_microbatches:
            self.schedule(self.config.schedule)  # refuses numbers that do not fit
        return Batches(
            self.layout,
            microbatches=self.config.microbatches_on(self.num_stages),
            one_by_one=self.in_microbatches,
        )

    @property
    def in_microbatches(self) -> bool:
        """Whether the batch goes through the layers microbatch by microbatch."""
        return _in_microbatches(self.config, self.num_stages)

    @overload
    def schedule(self, name: Literal["circular"]) -> CircularSchedule: ...

    @overload
    def schedule(self, name: Literal["1f1b"]) -> OneForwardOneBackward: ...

    def schedule(self, name: str) -> Schedule:
        """The schedule called `name`; raises InputError when its numbers do not fit together."""
        repeats, stages, _ = self.stack
        return make_schedule(
            name,
            stages=stages,
            microbatches=self.config.microbatches_on(stages),
            repeats=repeats,
            delay=self.config.forwarding_delay,
        )

    def _stack(self, layers: Any) -> Any:
        """The parameters of the stages: the layers, and the number of each.

        Both have an axis of copies along the mesh axes of `_copied`. If the layers of a stage are
        held apart, it is a list of such pairs, one for each layer of a stage.
        """
        numbers, copied = self._numbers, self._copied
        if self.weights.zero1:
            shards = self._shards(layers, skip=0, axis=2)
            layers = shards.copies(layers) if copied else shards.of(layers)
        if copied:
            copies = math.prod(mesh_sizes()[axis] for axis in copied)
            numbers = jnp.repeat(numbers[:, :, None], copies, axis=2)
        stack = layers, place(numbers, self._numbers_spec(stacked=True))
        if not self._in_turn.apart:
            return stack
        axis = self._layer_axis
        return [
            jax.tree.map(lambda leaf, at=at: jax.lax.index_in_dim(leaf, at, axis, False), stack)
            for at in range(self.layers_per_stage)
        ]

    @property
    def _layer_axis(self) -> int:
        """The position of the layers of a stage in a parameter, which may have copies before."""
        return 3 if self._copied else 2

    @property
    def _copied(self) -> tuple[str, ...]:
        """The mesh axes of ZeRO-1 along which the parameters are copied before the loop.

        There are none where the loop itself gathers weights: it then gathers the shards of ZeRO-1,
        and adds up gradients as shards.
        """
        copies = self.layout.axes("copy")
        return copies if copies == self.weights.zero1 and not gathered_axes(self.config) else ()

    @property
    def _numbers(self) -> Array:
        return jnp.arange(self.num_layers, dtype=jnp.int32).reshape(self.stack)

    def _numbers_spec(self, *, stacked: bool) -> P:
        """The partition spec of the numbers, with or without the axis of the layers of a stage."""
        copies = (self._copied,) if self._copied else ()
        return P(*self.layout.spec(None, "stage"), *copies, *[None] * stacked)

    def _apply_stage(self, stack: Any, x: Array, side: Side) -> tuple[Array, PyTree]:
        """Applies the layers of one stage to one microbatch, once per copy of the weights."""
        layout = self.layout.gathered(gathered_axes(self.config))
        pairs = stack if self._in_turn.apart else [stack]
        pairs = [(with_layout(layers, layout), numbers) for layers, numbers in pairs]
        stack = pairs if self._in_turn.apart else pairs[0]

        def run(stack: Any, x: Array, side: Side) -> tuple[Array, PyTree]:
            return self._in_turn(lambda x, layer: call_layer(layer, x, side), stack, x)

        copies = self.layout.axes("copy")
        if not copies:
            x, metrics = run(stack, x, side)
            return x, over_layers(metrics)
        x, metrics = jax.vmap(run, spmd_axis_name=copies)(stack, x, side)
        return x, over_layers(metrics, copies=0)

    def _run_whole_batch(self, layers: Any, x: Array, side: Side) -> tuple[Array, PyTree]:
        """Applies all layers to the whole batch, in copies if gradients are sharded by ZeRO-1.

        Copies are made layer by layer, so that the full gradient of only one layer exists at a
        time.
        """
        copies = self.layout.axes("copy")
        shards = self._shards(layers, skip=3, axis=0) if copies else None
        call = functools.partial(call_layer, microbatches=self.batches.microbatches)

        def apply(x: Array, stacked: Any) -> tuple[Array, PyTree]:
            layer, number = stacked
            if shards is None:
                return call((layer, number), x, side)

            def one(layer: Any, x: Array, side: Side) -> tuple[Array, PyTree]:
                return call((layer, number), x, side)

            return jax.vmap(one, spmd_axis_name=copies)(shards.copies(layer), x, side)

        if isinstance(layers, Zero1Layers):
            whole = with_layout(layers.whole, self.layout)
            layers = dataclasses.replace(layers, whole=whole)
        else:
            layers = with_layout(layers, self.layout)
        # There is one stage here, and `Config` allows several repeats with several stages only.
        stack = jax.tree.map(_in_order, (layers, self._numbers))
        x, metrics = self._in_turn(apply, stack, x)
        return x, given_out(over_layers(metrics, copies=1 if copies else None), x)

    @property
    def _in_turn(self) -> LayersInTurn:
        remat = POLICIES[self.config.remat]
        return LayersInTurn(self.layers_per_stage, remat, self.in_microbatches)

    def _options(self, layers: Any) -> LoopOptions:
        """The options for either loop."""
        # One layer's input is the stage's input, which is kept anyway.
        inputs = self.layers_per_stage > 1 and self.config.save_decoder_layer_input
        accumulate = None
        if self.config.accumulates:
            accumulate = Accumulation(
                grad_dtype=self.weights.grad_dtype, weights=self._gathering(layers)
            )
        return LoopOptions(
            shift_by=self.config.shift,
            remat=POLICIES[self.config.remat],
            saved_in_stage=(LAYER_METRICS, LAYER_INPUT) if inputs else (LAYER_METRICS,),
            accumulate=accumulate,
            parts=self.parts,
        )

    def _gathering(self, layers: Any) -> WeightGathering:
        copies, gathered = self.layout.axes("copy"), gathered_axes(self.config)
        ahead = self.config.fsdp_gather == "prefetch"
        if copies == self._copied:
            return WeightGathering(ahead=ahead)
        apart, at = self._in_turn.apart, self._layer_axis
        specs = self._shards(layers, skip=0, axis=2).sharded
        if apart:
            specs = tuple(P(*spec[:at], *spec[at + 1 :]) for spec in specs)
        pair = (*specs, self._numbers_spec(stacked=not apart))
        return WeightGathering(
            specs=pair * (self.layers_per_stage if apart else 1),
            copies=copies,
            gathered=(*gathered, *self.weights.zero1),
            dtype=self.weights.dtype if gathered else None,
            ahead=ahead,
        )

    def _shards(self, layers: Any, *, skip: int, axis: int) -> GradientShards:
        whole = layers.whole if isinstance(layers, Zero1Layers) else layers
        weights = self.weights
        return gradient_shards(
            whole, self.layout, weights.zero1, skip=skip, axis=axis, dtype=weights.grad_dtype
        )


def make_runner(
    config: PipelineConfig,
    *,
    num_layers: int,
    layout: Layout = Layout(),
    weights: WeightOptions = WeightOptions(),
    parts: LoopParts = DEFAULT_PARTS,
) -> Runner:
    """Makes the runner for the ambient mesh.

    - `config`: how the layers run over the stages.
    - `num_layers`: the number of layers of the whole model.
    - `layout`: the mesh axes that each logical axis is sharded over.
    - `weights`: as for `CircularPipeline`.
    - `parts`: pieces of the loop that an experiment exchanges.

    Raises InputError when the layers do not divide into stages and repeats. The number of
    microbatches is not checked here but when a batch comes, so that a model can be created on a
    mesh that its number of microbatches does not fit.
    """
    mesh = ambient_mesh()
    divides(
        mesh.stage * config.num_repeats,
        num_layers,
        rule=f"{num_layers} layers do not split into {mesh.stage} stages × "
        f"{config.num_repeats} repeats",
    )
    on_mesh = layout.axes("batch")
    zero1 = tuple(axis for axis in on_mesh if axis in weights.zero1)
    copies = {*zero1}
    # Where the loop adds up gradients, each device adds up those of its own sequences on a copy of
    # the weights. The sum over devices is made after the ticks, or after each visit over the axes
    # that `fsdp_gather=step` gathers over.
    if config.accumulates and _in_microbatches(config, mesh.stage):
        copies |= {"data", *gathered_axes(config)}
    return Runner(
        config,
        num_layers,
        mesh.stage,
        layout.in_copies(tuple(axis for axis in on_mesh if axis in copies)),
        dataclasses.replace(weights, zero1=zero1),
        parts,
    )


def _in_order(leaf: Array) -> Array:
    """`[repeats, 1, layers per stage, …]` as `[layers, …]`: one stage has all of them."""
    return leaf[0, 0] if leaf.shape[0] == 1 else leaf.reshape(-1, *leaf.shape[3:])


def gathered_axes(config: PipelineConfig) -> tuple[str, ...]:
    """The mesh axes over which weights are gathered before the ticks that use them."""
    return () if config.fsdp_gather == "use" else ("fsdp",)


def _in_microbatches(config: PipelineConfig, stages: int) -> bool:
    return stages > 1 or config.schedule == "1f1b"
