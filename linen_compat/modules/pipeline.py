"""The pipeline as a Linen module: it owns the layers of all stages and runs batches."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from linen_compat.modules._stacked import Boxed, LinenStack, StageTree, parameters_of
from linen_compat.modules.parameters import Configured
from nnx_pipeline import InputError, Layout, PipelineConfig
from nnx_pipeline.pipeline._runner import Runner, make_runner
from nnx_pipeline.pipeline.contract import ModelEnds
from nnx_pipeline.pipeline.layers import split_shared, with_keys
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.pipeline.stage.layers import LayerPlace, Side, takes_place
from nnx_pipeline.sharding.layout import place


class CircularPipeline(Configured):
    """Layers of one kind, where each microbatch goes round the stages `num_repeats` times.

    - `layer`: an unbound Linen module, called as `layer(x, **side)` on `[batch, …]` to `(x,
      metrics)`. Every metric is wrapped in `nnx_pipeline.Sum`, `Mean` or `Max`, or metrics is None.
      The layer may hold `params` only; they may be in boxes of MaxText's logical axes. An attribute
      `layout` is replaced where weights are gathered ahead of their use. Sown values are lost.
    - `num_layers`: the number of layers in the whole model.
    - `layout`: the mesh axes over which each logical axis is sharded.
    - `weights`: dtypes of weights and gradients in the loop, and how gradients are sharded.

    The parameters are MaxText's `pipeline_module`, below `layers`: `[repeats, stages, …]` or with
    one repeat `[stages, …]`, and where a stage has several layers, layer j of each stage below
    `layers_{j}`. The number of a layer is (repeat · stages + stage) · layers per stage + j. `init`
    and `apply` it under the same `jax.set_mesh`. The loop is `nnx_pipeline.CircularPipeline`'s.
    """

    config: PipelineConfig
    layer: nn.Module
    num_layers: int
    layout: Layout = Layout()
    weights: WeightOptions = WeightOptions()

    def __call__(
        self, x: Array, *, key: Array | None = None, **side: PyTree
    ) -> tuple[Array, PyTree]:
        """`[batch, …]` through all layers, and the metrics of all of them, each one array.

        - `x`: `[batch, …]`; the result has the same shape.
        - `key`: for dropout.
        - `side`: what a layer reads beside x, `[batch, …]` each, by the names of its arguments,
          which are not `key`, `keys` or `place`; None is passed on, and `Shared(value)` as the
          value, whole.
        """
        x, keys, batch = self.runner.batches.arrange_all(x, key)
        y, metrics = self.run(x, side, keys=keys)
        return self.runner.batches.as_batch(y, batch), metrics

    def run(self, x: Array, side: Side, *, keys: Array | None = None) -> tuple[Array, PyTree]:
        """As `__call__`, for a batch that `batches.arrange` has laid out."""
        axes = len(self.runner.batches.axes)  # the axes in the place of the batch
        all_side = with_keys(side, keys)
        layers = self._layers(math.prod(x.shape[:axes]), x.shape[axes:], x.dtype, all_side)
        return self.runner.run(layers, x, side, keys=keys)

    def loss(
        self,
        ends: ModelEnds,
        inputs: tuple[PyTree, PyTree],
        side: Side,
        *,
        width: tuple[int, ...],
        keys: Array | None = None,
        metric_weights: PyTree = None,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of the whole model by 1F1B, and its two parts; arguments as of `Runner.loss`.

        - `width`: the shape of the activations of one token, whose dtype is `weights.dtype`. What
          `ends.enter` reads begins with an array of tokens, `[batch, …]`.
        """
        batch, *row = jax.tree.leaves(inputs[0])[0].shape
        all_side = with_keys(side, keys)
        layers = self._layers(batch, (*row, *width), self.weights.dtype, all_side)
        loss: tuple[Array, tuple[Array, PyTree]] = self.runner.loss(
            layers, ends, inputs, side, keys=keys, metric_weights=metric_weights
        )
        return loss

    @property
    def runner(self) -> Runner:
        runner = make_runner(
            self.config, num_layers=self.num_layers, layout=self.layout, weights=self.weights
        )
        if runner.stack.padding:
            raise InputError(
                f"pipeline.stage_layers={self.config.stage_layers} would pad {self.num_layers} "
                f"layers to {self.num_layers + runner.stack.padding}, which MaxText's tree of "
                "parameters has no place for; use nnx_pipeline.CircularPipeline, or a number of "
                "layers that divides"
            )
        return runner

    @nn.compact
    def _layers(
        self, batch: int, row: tuple[int, ...], dtype: DTypeLike | None, side: Side
    ) -> LinenStack:
        """The stacked layers, which are made now under `init`.

        `row` is the shape of one sequence of activations; `side` is what a layer reads besides.
        """
        runner = self.runner
        module = self.layer.clone(parent=None, name=None)
        # `init` runs a layer once, on what it gets at a time: a microbatch, or the whole batch.
        microbatch = batch // (runner.batches.microbatches if runner.in_microbatches else 1)

        def zeros(row: tuple[int, ...], dtype: DTypeLike | None) -> Array:
            spec = self.layout.spec("batch", *[None] * len(row))
            return place(jnp.zeros((microbatch, *row), dtype), spec)

        def make_layer(key: Array) -> Boxed:
            cut, shared = split_shared(side)
            example = jax.tree.map(lambda x: zeros(x.shape[1:], x.dtype), cut) | shared
            first = {"place": LayerPlace.of(jnp.int32(0), runner.stack)}
            extra = first if takes_place(module) else {}
            return parameters_of(module, key, zeros(row, dtype), {**example, **extra})

        tree = StageTree(runner.stack.shape, self.layout)
        make = functools.partial(tree.make, make_layer=make_layer)
        if self.is_initializing():
            params = self.param("layers", make, unbox=False)
        else:
            params = self.get_variable("params", "layers", {})
        return tree.stacked(params, make_layer, module)


class Pipeline(CircularPipeline):
    """The plain pipeline: a circular one in which each microbatch passes every stage once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.num_repeats != 1:
            raise InputError(
                f"pipeline.num_repeats={self.config.num_repeats} is for a CircularPipeline; "
                "set it to 1 or use CircularPipeline"
            )
