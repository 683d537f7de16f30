"""The pipeline as an NNX module, which owns the stacked layers and sends batches through them."""

from typing import Any

from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.errors import InputError
from nnx_pipeline.ops.dropout import sequence_keys
from nnx_pipeline.pipeline.batches import Batches
from nnx_pipeline.pipeline.entry import by_names
from nnx_pipeline.pipeline.layers import MakeLayer, make_layers
from nnx_pipeline.pipeline.one_f_one_b.state import ModelEnds
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.pipeline.parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.runner import make_runner
from nnx_pipeline.pipeline.stage.layers import Side
from nnx_pipeline.sharding import Layout


class CircularPipeline(nnx.Module):
    """A pipeline of stacked layers in which a microbatch passes all stages `num_repeats` times.

    Every parameter of `self.layers` is `[repeats, stages, layers per stage, …]`, with layer =
    (repeat · stages + stage) · layers per stage + j. Create and call the pipeline under the same
    `jax.set_mesh`. On a mesh without stages the layers run one after the other on the whole batch
    (with `schedule="1f1b"` microbatch by microbatch). Initial values depend on `rngs`, not on the
    mesh.

    - `config`: how the layers run over the stages.
    - `layers`: makes one layer: an NNX module that is called as `layer(x, **side)` on `[batch, …]`
      and returns `(x, metrics)`, with x of the same shape, dtype and sharding. The metrics are None
      or any pytree of floating arrays, each wrapped in a class such as `Sum`, `Mean` or `Max`,
      which says how its values combine over all layers and microbatches (see `pipeline.metrics`).
      If the pipeline is called with a `key`, the layer also gets `keys`, `[batch, words]`: one key
      per sequence, which depends on the key, the sequence and the layer alone (see `ops.dropout`).
      Its parameters may have logical axes (`sharding.parameter`); without them they are whole on
      every device of a stage. An attribute `layout` is replaced by the layout in which the layer
      runs, which is another one where weights are gathered ahead of their use or held in copies.
    - `num_layers`: the number of layers of the whole model.
    - `rngs`: whose `params` stream gives each layer a key of its own.
    - `layout`: the mesh axes that each logical axis is sharded over.
    - `weights`: the dtypes in which weights are gathered and gradients added up, and whether each
      device gets full gradients or a shard of them.
    - `parts`: pieces of the loop that an experiment exchanges.

    Raises InputError when layers do not divide, when they hold state that is not a parameter, and
    when it is called with microbatches that do not fit the stages.
    """

    def __init__(
        self,
        config: PipelineConfig,
        layers: MakeLayer,
        *,
        num_layers: int,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        weights: WeightOptions = WeightOptions(),
        parts: LoopParts = DEFAULT_PARTS,
    ) -> None:
        self._check_repeats(config.num_repeats)
        self.runner = make_runner(
            config, num_layers=num_layers, layout=layout, weights=weights, parts=parts
        )
        self.layers = make_layers(layers, self.runner.stack, rngs=rngs, layout=layout)

    def __call__(
        self, x: Array, *, key: Array | None = None, **side: Array | None
    ) -> tuple[Array, PyTree]:
        """Applies all layers; returns the activations, and the metrics of all layers as arrays.

        - `x`: floating `[batch, …]`.
        - `key`: a key for dropout, which is left out without one.
        - `side`: what a layer reads beside x, `[batch, …]` each, by the names of its arguments,
          which are not `key` or `keys`; None is passed on as it is.
        """
        batch = x.shape[0]
        self.batches.check(batch)
        keys = None if key is None else sequence_keys(key, batch)
        y, metrics = self.runner.run(self.placed_layers, self.batches.arrange(x), side, keys=keys)
        return self.batches.as_batch(y, batch), metrics

    def loss(
        self,
        ends: ModelEnds,
        inputs: tuple[PyTree, PyTree],
        side: Side,
        *,
        keys: Array | None = None,
        metric_weights: PyTree = None,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of a whole model by 1F1B, and its two parts.

        - `ends`, `inputs`, `side`, `keys`, `metric_weights`: as for `Runner.loss`.
        """
        layers = self.placed_layers
        return self.runner.loss(
            layers, ends, inputs, side, keys=keys, metric_weights=metric_weights
        )

    @property
    def placed_layers(self) -> Any:
        """The layers with every variable moved to the placement of its logical axes."""
        return by_names(self.layers, self.runner.layout)

    @property
    def batches(self) -> Batches:
        """How a batch is cut and laid out on the ambient mesh; see `Runner.batches`."""
        return self.runner.batches

    @property
    def config(self) -> PipelineConfig:
        """How the layers run over the stages."""
        return self.runner.config

    @property
    def num_stages(self) -> int:
        """How many stages the layers were made for."""
        return self.runner.num_stages

    def _check_repeats(self, repeats: int) -> None:
        """Accepts any number; `Pipeline` overrides it."""


class Pipeline(CircularPipeline):
    """The plain pipeline: a circular one in which a microbatch passes every stage once.

    Raises InputError for a config with more than one repeat.
    """

    def _check_repeats(self, repeats: int) -> None:
        if repeats != 1:
            raise InputError(
                f"pipeline.num_repeats={repeats} is for a CircularPipeline; "
                "set it to 1 or use CircularPipeline (create_pipeline chooses)"
            )
