"""The pipeline as an NNX module: it owns the stacked layers and sends batches through them."""

from typing import Any

from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.ops.dropout import sequence_keys
from nnx_pipeline.pipeline.batches import Batches
from nnx_pipeline.pipeline.entry import by_names
from nnx_pipeline.pipeline.layers import MakeLayer, make_layers
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.one_f_one_b_state import Enter, Leave
from nnx_pipeline.pipeline.runner import make_runner
from nnx_pipeline.pipeline.stages import OverStages, over_stages
from nnx_pipeline.pipeline_config import PipelineConfig
from nnx_pipeline.sharding import Layout


class CircularPipeline(nnx.Module):
    """Layers of one kind, stacked, each microbatch going round the stages `num_repeats` times.

    Every parameter of `self.layers` is `[repeats, stages, layers per stage, …]`, with layer =
    (repeat · stages + stage) · layers per stage + j. Made and called under the same `jax.set_mesh`;
    on a mesh without stages the layers run one after the other on the whole batch (with
    `schedule="1f1b"` microbatch by microbatch). Initial values depend on `rngs`, not on the mesh.

    layers: makes one layer: an NNX module that is called as `layer(x, **side)` on `[batch, …]` and
        returns `(x, metrics)`, x of the same shape, dtype and sharding; the metrics are any pytree
        of floating arrays, each wrapped in `Sum`, `Mean` or `Max`, which says what it is over all
        layers and microbatches (see `pipeline.metrics`), or None. With a `key` it is given `keys`
        too, `[batch, words]`: for every sequence one that depends on the key, the sequence and the
        layer alone (see `ops.dropout`). Its parameters may
        bear logical axes (`sharding.parameter`); without them they are whole on every device of a
        stage. An attribute `layout` is replaced where weights are gathered ahead of their use.
    dtype: that of the activations, to which weights are cast before they are gathered ahead.
    grad_dtype: that in which gradients add up where the loop does so, None for the parameters'.
    own: mesh axes along which each device gets its part of the gradients only, in `owned` of `run`
        and `loss`: the parameters laid out by `Layout.owned`. () for gradients as the parameters.
    over: how a function of one stage is spread over the stages. loop_parts: other pieces of the
        circular loop. Others than the defaults are arms of experiments.

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
        dtype: str | None = None,
        grad_dtype: str | None = None,
        own: tuple[str, ...] = (),
        over: OverStages = over_stages,
        loop_parts: LoopParts = DEFAULT_PARTS,
    ) -> None:
        self.runner = make_runner(
            config,
            num_layers=num_layers,
            layout=layout,
            dtype=dtype,
            grad_dtype=grad_dtype,
            own=own,
            over=over,
            loop_parts=loop_parts,
        )
        self.layers = make_layers(layers, self.runner.stack, rngs=rngs, layout=layout)

    def __call__(
        self, x: Array, *, key: Array | None = None, **side: Array | None
    ) -> tuple[Array, PyTree]:
        """`[batch, …]` through all layers, and the metrics of all of them, each one array.

        key: for dropout. side: what a layer reads beside x, `[batch, …]` each, by the names of its
        arguments, which are not `key` or `keys`; None is handed on as it is.
        """
        batch = x.shape[0]
        self.batches.check(batch)
        keys = None if key is None else sequence_keys(key, batch)
        y, metrics = self.run(self.batches.arrange(x), side, keys=keys)
        return self.batches.as_batch(y, batch), metrics

    def run(self, x: Array, side: dict[str, Array | None], **options: Any) -> tuple[Array, PyTree]:
        """As `__call__`, for x laid out by `batches.arrange`; options: those of `Runner.run`."""
        return self.runner.run(self._placed_layers, x, side, **options)

    def loss(
        self,
        enter: Enter,
        leave: Leave,
        weights: tuple[PyTree, PyTree],
        inputs: tuple[PyTree, PyTree],
        side: dict[str, Array | None],
        **options: Any,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of the whole model by 1F1B, and its two parts; see `Runner.loss`."""
        return self.runner.loss(self._placed_layers, enter, leave, weights, inputs, side, **options)

    @property
    def _placed_layers(self) -> Any:
        return by_names(self.layers, self.runner.layout)

    @property
    def batches(self) -> Batches:
        """How a batch is cut up and laid out on this mesh; see `Runner.batches`."""
        return self.runner.batches

    @property
    def config(self) -> PipelineConfig:
        """How the layers run."""
        return self.runner.config

    @property
    def num_stages(self) -> int:
        """How many stages the layers were made for."""
        return self.runner.num_stages
