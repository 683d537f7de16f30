"""Runs stacked layers, in a pipeline or one after the other, for both NNX and Linen."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import LAYER_INPUT, LAYER_METRICS, remat_of
from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.lab.mesh import ambient_mesh
from nnx_pipeline.pipeline._entry import Batches
from nnx_pipeline.pipeline._stack import Stack, make_stack
from nnx_pipeline.pipeline._stacked import StackedLayers, check_layer_state
from nnx_pipeline.pipeline.circular.run import run_pipeline
from nnx_pipeline.pipeline.contract import Inputs, ModelEnds, ModelFunctions, Weights, check_loss
from nnx_pipeline.pipeline.gather import gathered_axes
from nnx_pipeline.pipeline.layers import split_shared, with_keys
from nnx_pipeline.pipeline.one_f_one_b.run import run_one_f_one_b
from nnx_pipeline.pipeline.options import Accumulation, LoopOptions, WeightOptions
from nnx_pipeline.pipeline.schedule import (
    CircularSchedule,
    OneForwardOneBackward,
    Schedule,
    make_schedule,
)
from nnx_pipeline.pipeline.stage import _repeats as repeats
from nnx_pipeline.pipeline.stage._split import BatchSplit
from nnx_pipeline.pipeline.stage._whole_batch import run_whole_batch
from nnx_pipeline.pipeline.stage.layers import LayerSequence, Side, StageLayers
from nnx_pipeline.pipeline.stage.state import WithState, parted
from nnx_pipeline.sharding.layout import Layout, P, is_explicit, place


@dataclass(frozen=True)
class Runner:
    """Runs the layers of a pipeline without owning them; `make_runner` makes one.

    The layers that its methods take are one callable pytree of variables `[repeats, stages, layers
    per stage, …]` with `logical_axes`, as `make_layers` makes it, or a list of them, one for each
    kind. With ZeRO-1 they are `Zero1Layers`.
    """

    config: PipelineConfig
    stack: Stack
    layout: Layout  # with an axis of copies where the layers run in copies
    weights: WeightOptions  # `zero1` without mesh axes of size 1 and those beside the batch
    at_once: bool = False  # the caller sends all microbatches through the layers at once

    @property
    def num_stages(self) -> int:
        return self.stack.stages

    def run(
        self, layers: PyTree, x: PyTree, side: Side, *, keys: Array | None = None
    ) -> tuple[PyTree, ...]:
        """Applies all layers to activations; returns the result and the metrics of all layers.

        - `layers`: as `split_state` gives them. What they leave of their state, if any, is returned
          last.
        - `x`: laid out by `batches.arrange`, as the result is.
        - `side`: what a layer reads besides x, `[batch, …]` each, by the names of its arguments.
        - `keys`: for dropout, as `sharding.dropout.sequence_keys` makes them; None leaves it out.
        """
        check_layer_state(layers, self.config, self.layout, self.num_stages)
        side, shared = split_shared(with_keys(side, keys))
        first = jax.tree.leaves(x)[0]
        self.batches.check_inputs(side, math.prod(first.shape[: len(self.batches.axes)]))
        if not self.in_microbatches:
            side = jax.tree.map(self.batches.arrange, side)
            params, state = parted(layers)
            kinds = self._stacked_layers.kinds(params, self.layout)
            copies_of = self._stacked_layers.copies_of_layer
            return run_whole_batch(
                kinds, x, side, state, stage=self._stage(shared), copies_of=copies_of
            )
        return run_pipeline(
            self._stage(shared),
            self._stacked(layers),
            x,
            jax.tree.map(self.batches.on_every_stage, side),
            schedule=self.schedule("circular"),
            options=self._options(layers),
        )

    def loss(
        self,
        layers: PyTree,
        ends: ModelEnds,
        inputs: tuple[PyTree, PyTree],
        side: Side,
        *,
        keys: Array | None = None,
        metric_weights: PyTree = None,
    ) -> PyTree:
        """As `CircularPipeline.loss`, with `keys` as for `run`."""
        check_layer_state(layers, self.config, self.layout, self.num_stages)
        side, shared = split_shared(with_keys(side, keys))
        check_loss(ends, inputs, self.config.schedule)
        arrays = (inputs[0], side, inputs[1])
        for leaf in jax.tree.leaves(inputs[0])[:1]:
            batch = (*jnp.shape(leaf), 0)[0]
            self.batches.check_inputs(arrays, batch)
            self.batches.check(batch)
        return run_one_f_one_b(
            ModelFunctions(
                lambda weights, rows: self._as_activations(ends.enter(weights, rows), rows),
                self._stage(shared),
                ends.leave,
                metric_weights,
                ends.lift,
            ),
            Weights(ends.enter_weights, self._stacked(layers), ends.leave_weights),
            Inputs(*jax.tree.map(self.batches.on_every_stage, arrays)),
            schedule=self.schedule("1f1b"),
            options=self._options(layers),
        )

    def _as_activations(self, x: PyTree, rows: PyTree) -> PyTree:
        """What `enter` made of these rows, with the batch sharded as the layers' outputs."""
        number = len(self.batches.axes) - 1
        for leaf in jax.tree.leaves(x):
            want = [jnp.shape(row)[:number] for row in jax.tree.leaves(rows)[:1]]
            if want and jnp.shape(leaf)[:number] != want[0]:
                raise InputError(
                    f"`enter` was given a microbatch {[*want[0]]} and returned an array "
                    f"{[*jnp.shape(leaf)]}; its first {number} axes must be those of the microbatch"
                )
        if not is_explicit():
            return x
        batch = self.layout.spec(*self.batches.axes[1:])

        def placed(leaf: Array) -> Array:
            spec = jax.typeof(leaf).sharding.spec
            wanted = P(*batch, *spec[len(batch) :])
            return leaf if spec == wanted else place(leaf, wanted)

        return jax.tree.map(placed, x)

    @property
    def batches(self) -> Batches:
        """How a batch is cut and laid out on the ambient mesh."""
        on_mesh = ambient_mesh().stage
        if on_mesh != self.num_stages:
            raise InputError(
                f"the pipeline was made for {counted(self.num_stages, 'stage')} and the mesh has "
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
        return not self.at_once and self.config.loops_on(self.num_stages)

    @overload
    def schedule(self, name: Literal["circular"]) -> CircularSchedule: ...

    @overload
    def schedule(self, name: Literal["1f1b"]) -> OneForwardOneBackward: ...

    def schedule(self, name: str) -> Schedule:
        return make_schedule(
            name,
            stages=self.num_stages,
            microbatches=self.config.microbatches_on(self.num_stages),
            repeats=self.stack.repeats,
            delay=self.config.forwarding_delay,
        )

    def split(self, shared: Side) -> BatchSplit | None:
        if self.config.batch_split == 1:
            return None
        devices = self.layout.size("batch")
        return BatchSplit(self.config.batch_split, devices, frozenset({"place", *shared}))

    def _stacked(self, layers: PyTree) -> PyTree:
        layers, state = parted(layers)
        stacked = self._stacked_layers.stacked(layers)
        return stacked if state is None else WithState(stacked, state)

    def _stage(self, shared: Side) -> StageLayers:
        layout = self.layout.gathered(gathered_axes(self.config))
        microbatches = 1 if self.in_microbatches else self.batches.microbatches
        split = self.split(shared)
        return StageLayers(self.stack, self._sequence, layout, split, shared, microbatches)

    @property
    def _sequence(self) -> LayerSequence:
        remat = remat_of(self.config.remat)
        stack = self.stack
        return LayerSequence(
            stack.per_stage,
            stack.kinds,
            remat,
            self.in_microbatches,
            self.config.unrolled_layers,
            self.config.remat_groups,
        )

    @property
    def _stacked_layers(self) -> StackedLayers:
        unrolled = self._sequence.unrolled
        return StackedLayers(self.config, self.stack, self.layout, self.weights, unrolled)

    def _options(self, layers: PyTree) -> LoopOptions:
        # One layer's input is the stage's input, which is saved anyway.
        inputs = self.stack.per_stage > 1 and self.config.save_decoder_layer_input
        accumulate = None
        if self.config.accumulates:
            accumulate = Accumulation(
                grad_dtype=self.weights.grad_dtype,
                fsdp_gather=self._stacked_layers.fsdp_gather(layers),
            )
        return LoopOptions(
            shift_by=self.config.shift,
            remat=remat_of(self.config.remat),
            saved_in_stage=(LAYER_METRICS, LAYER_INPUT) if inputs else (LAYER_METRICS,),
            accumulate=accumulate,
            cast_at_use=self.weights.cast_at_use,
            sums_in_layers=self._sums_in_layers,
            depths=self.stack.depths if self.stack.padding else (),
        )

    @property
    def _sums_in_layers(self) -> bool:
        """Whether a scan over the layers of a stage adds up their gradients."""
        # Of more than two repeats a visit's gradients go to a slice of one array. Gathered weights
        # have other accumulators than the layers that they are of.
        scanned = self.stack.per_stage > 1 and not self._sequence.unrolled
        few = self.stack.repeats <= repeats.SEPARATE_REPEATS
        return scanned and few and not gathered_axes(self.config)


def make_runner(
    config: PipelineConfig,
    *,
    num_layers: int,
    kinds: int = 1,
    layout: Layout = Layout(),
    weights: WeightOptions = WeightOptions(),
) -> Runner:
    """The runner for the ambient mesh; raises InputError for layers that do not divide."""
    # The number of microbatches is not checked here but when a batch comes, so that a model can be
    # created on a mesh that its number of microbatches does not fit.
    stack = make_stack(
        num_layers,
        stages=ambient_mesh().stage,
        repeats=config.num_repeats,
        kinds=kinds,
        stage_layers=config.stage_layers,
    )
    on_mesh = layout.axes("batch")
    zero1 = tuple(axis for axis in on_mesh if axis in weights.zero1)
    copies = {*zero1}
    # Where the loop adds up gradients, each device has a copy of the weights and adds up the
    # gradients of its own sequences. They are summed over devices after the ticks, or after each
    # visit over the axes that `fsdp_gather=step` gathers over.
    if config.accumulates:
        copies |= {"data", *gathered_axes(config)}
    return Runner(
        config,
        stack,
        layout.in_copies(tuple(axis for axis in on_mesh if axis in copies)),
        dataclasses.replace(weights, zero1=zero1),
    )
