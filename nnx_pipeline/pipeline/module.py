"""The pipeline as an NNX module, which owns the stacked layers and sends batches through them."""

from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config.pipeline import PipelineConfig
from nnx_pipeline.lab.errors import InputError, of_type
from nnx_pipeline.pipeline._entry import Batches, by_names
from nnx_pipeline.pipeline._runner import make_runner
from nnx_pipeline.pipeline.contract import ModelEnds
from nnx_pipeline.pipeline.layers import MakeLayer, as_kinds, make_layers
from nnx_pipeline.pipeline.options import WeightOptions
from nnx_pipeline.pipeline.stage._explained import errors_explained
from nnx_pipeline.pipeline.stage.layers import Side
from nnx_pipeline.pipeline.stage.state import WithState
from nnx_pipeline.pipeline.stage.variables import split_state, write_state
from nnx_pipeline.sharding.dropout import sequence_keys
from nnx_pipeline.sharding.layout import Layout


class CircularPipeline(nnx.Module):
    """A pipeline of stacked layers in which a microbatch passes all stages `num_repeats` times.

    Every parameter of `self.layers` is `[repeats, stages, layers per stage, …]`, with layer =
    (repeat · stages + stage) · layers per stage + j, unless `config.stage_layers` says otherwise.
    Create and call the pipeline under the same `jax.set_mesh`. A mesh without stages is a pipeline
    of one stage, with the same options; with one microbatch the layers run one after the other on
    the whole batch. Initial values depend on `rngs`, not on the mesh.

    - `config`: how the layers run over the stages.
    - `layers`: makes one layer: an NNX module that is called as `layer(x, **side)` on `[batch, …]`
      and returns `(x, metrics)`, with x, an array or a pytree of arrays, of the same shape, dtype
      and sharding. The metrics are None or any pytree of floating arrays, each wrapped in a class
      such as `Sum`, `Mean` or `Max`, which says how its values combine over all layers and
      microbatches. If the pipeline is called with a `key`, the layer also gets `keys`, `[batch,
      words]`: one key per sequence, which depends on the key, the sequence and the layer alone, for
      `pipeline.dropout`. If its call takes an argument `place`, it gets a `LayerPlace`: its number
      in the model, and its stage and repeat. Running statistics (`nnx.BatchStat`), counters of
      random numbers, and `LayerState` are state: a call of the layer reads what the same layer's
      call for the microbatch before left, and after the call of the pipeline `self.layers` holds
      what the last one left. With the metadata `over_microbatches="mean"` of a variable, all
      microbatches read what it was before the call, and the mean of what they left is kept. Of a
      cache (`nnx.Cache`) each microbatch has its own, `[repeats, stages, layers per stage,
      microbatches, …]`, so that the next call of the pipeline reads what this one left of the same
      sequences. State has no gradient. Variables of all other types but parameters are read alone,
      and have none either. Its parameters may have logical axes (`sharding.parameter`); without
      them they are whole on every device of a stage. An attribute `layout` is replaced by the
      layout in which the layer runs, which is another one where weights are gathered ahead of their
      use or held in copies. A list of such functions is for layers of several kinds, which take
      turns: with two, layer i is of the first kind if i is even. The layers of a stage are a
      multiple of their number, and `self.layers` is a list with the stack of each kind. All kinds
      pass on the same activations and get the same `side`, and each reports the same metrics, or
      None.
    - `num_layers`: of the whole model. With `config.stage_layers` they need not divide into stages
      and repeats: the places after the layers of a visit compute on parameters that are never
      trained, and what they compute is discarded.
    - `rngs`: whose `params` stream gives each layer a key of its own.
    - `layout`: the mesh axes that each logical axis is sharded over.
    - `weights`: the dtypes in which weights are gathered and gradients added up, and whether each
      device gets full gradients or a shard of them.

    With `backward=accumulate`, `fsdp_gather` other than `use`, the 1F1B schedule and more layers
    per stage than `unrolled_layers` there is no forward mode (`jax.jvp`). Outside of `jax.jit` it
    raises InputError with the cure; within it JAX raises an error of its own.

    Raises InputError when layers do not divide, when one holds a variable in two places or changes
    one that is not state, and when it is called with microbatches that do not fit the stages.
    """

    def __init__(
        self,
        config: PipelineConfig,
        layers: MakeLayer | Sequence[MakeLayer],
        *,
        num_layers: int,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        weights: WeightOptions = WeightOptions(),
    ) -> None:
        if not isinstance(config, PipelineConfig):
            raise InputError(
                f"the config of a pipeline is {type(config).__name__}; give a PipelineConfig, such "
                "as the field pipeline of a Config"
            )
        of_type("layout of a pipeline", layout, Layout)
        of_type("weights of a pipeline", weights, WeightOptions)
        self._check_repeats(config.num_repeats)
        kinds = as_kinds(layers)
        self.runner = make_runner(
            config, num_layers=num_layers, kinds=len(kinds), layout=layout, weights=weights
        )
        self.layers = make_layers(
            kinds,
            self.runner.stack,
            microbatches=config.microbatches_on(self.runner.num_stages),
            rngs=rngs,
            layout=layout,
        )

    def __call__(
        self, x: PyTree, *, key: Array | None = None, **side: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Applies all layers; returns the activations, and the metrics of all layers as arrays.

        - `x`: floating `[batch, …]`, or any pytree of such arrays; the result is like it.
        - `key`: a key for dropout, which is left out without one.
        - `side`: what a layer reads besides x, `[batch, …]` each, by the names of its arguments,
          which are not `key`, `keys` or `place`; None is passed on as it is, and `Shared(value)` as
          the value, whole.
        """
        x, keys, batch = self.batches.arrange_all(x, key)
        y, metrics = self.run(x, side, keys=keys)
        return jax.tree.map(lambda leaf: self.batches.as_batch(leaf, batch), y), metrics

    def run(self, x: PyTree, side: Side, *, keys: Array | None = None) -> tuple[PyTree, PyTree]:
        """As a call, of activations that are laid out by `batches.arrange`, as the result is.

        - `x`: an array or any pytree of arrays.
        - `side`, `keys`: as for `Runner.run`.
        """
        layers = split_state(self.placed_layers, self.batches.microbatches)
        with errors_explained():
            y, metrics, *state = self.runner.run(layers, x, side, keys=keys)
        if state:
            write_state(self.layers, *state)
        return y, metrics

    def loss(
        self,
        ends: ModelEnds,
        inputs: tuple[PyTree, PyTree],
        side: Side,
        *,
        key: Array | None = None,
        metric_weights: PyTree = None,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of a whole model by 1F1B, and a pair: the loss of `ends.leave`, and the metrics.

        - `ends`: what comes before and after the layers. Both functions work on one microbatch;
          its activations have the axes of `batches.axes` without the first.
        - `inputs`: what `ends.enter` and what `ends.leave` reads, each `[batch, …]`.
        - `side`: what layers read besides activations, by the names of their arguments, as in a
          call; {} for nothing.
        - `key`: a key for dropout, which is left out without one, as in a call.
        - `metric_weights`: the weight of each metric in the loss, one number for all of them or a
          pytree like theirs; None leaves metrics out of the loss.
        """
        layers = split_state(self.placed_layers, self.batches.microbatches)
        keys = None if key is None else sequence_keys(key, _sequences_of(inputs))
        with errors_explained():
            total = self.runner.loss(
                layers, ends, inputs, side, keys=keys, metric_weights=metric_weights
            )
        if isinstance(layers, WithState):
            total, state = total
            write_state(self.layers, state)
        loss, parts = total
        return loss, parts

    @property
    def placed_layers(self) -> PyTree:
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


def _sequences_of(inputs: PyTree) -> int:
    """The number of sequences of `[batch, …]`; 0 for what is none, which is refused later."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(inputs)]
    return int((*(shapes or [()])[0], 0)[0])


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
