"""The whole decoder, embedding → layers → norm → head, as functions and as an NNX module.

`Mixtral` uses `Decoder` with NNX modules, and `linen_compat` with Linen modules.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_pipeline.config._remat import remat_of
from nnx_pipeline.config.config import Config
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab.errors import InputError, kind_of
from nnx_pipeline.lab.mesh import ambient_mesh
from nnx_pipeline.modules import DecoderLayer, Embed, RMSNorm
from nnx_pipeline.ops import _loss as losses
from nnx_pipeline.ops._head import head_of_table, logits_of
from nnx_pipeline.ops._loss import Targets, chunked_cross_entropy
from nnx_pipeline.ops._router import RouterMetrics, loss_weights
from nnx_pipeline.pipeline._runner import Runner
from nnx_pipeline.pipeline._zero1 import Zero1Layers
from nnx_pipeline.pipeline.contract import ModelEnds
from nnx_pipeline.pipeline.create import pipeline_of, weight_options
from nnx_pipeline.pipeline.layers import with_keys
from nnx_pipeline.pipeline.stage._early import EarlyLayers
from nnx_pipeline.pipeline.stage.layers import Side
from nnx_pipeline.sharding.dropout import sequence_keys
from nnx_pipeline.sharding.layout import Layout, P, constrain, parameter, place_by, with_layout

Loss = tuple[Array, tuple[Array, RouterMetrics]]


@dataclass(frozen=True)
class OuterLayers:
    """What comes before and after the layers: embedding, final norm and head.

    - `embed`: (`table`, token ids `[…, seq]`, sharding of the result) to `[…, seq, embed]`.
    - `norm`: (`scale`, `[…, seq, embed]`) to the same.
    - `early`, `early_layers`: runs these layers between embedding and pipeline; None for none.
    """

    embed: Callable[[PyTree, Array, P], Array]
    norm: Callable[[PyTree, Array], Array]
    table: PyTree
    scale: PyTree
    head: Array
    layout: Layout
    early: EarlyLayers | None = None
    early_layers: PyTree = None


@dataclass(frozen=True)
class Decoder:
    """The computation of a decoder on a batch, for both NNX and Linen modules.

    - `run_layers`: (x, side, keys=…) to (x, metrics): `Runner.run` with its layers filled in.
    - `run_loss`: `Runner.loss` with its layers filled in; used with `schedule="1f1b"` only.
    """

    config: Config
    runner: Runner
    outer: OuterLayers
    run_layers: Callable[..., tuple[Array, PyTree]]
    run_loss: Callable[..., tuple[Array, tuple[Array, PyTree]]] | None

    def logits(self, tokens: Array, side: Side, at: Array | None = None) -> Array:
        """As `Mixtral.__call__`; `side` has `positions` and `segment_ids`."""
        hidden, _ = self.hidden(tokens, side)
        hidden = self.runner.batches.as_batch(hidden, tokens.shape[0])
        if at is not None:
            _check_array("at", at, tokens.shape[:1])
            # A sum of one value and zeros: a gather has no sharding rule for these axes.
            wanted = at[:, None] == jnp.arange(tokens.shape[1], dtype=at.dtype)
            zero = jnp.zeros((), hidden.dtype)
            hidden = jnp.sum(jnp.where(wanted[:, :, None], hidden, zero), axis=1, keepdims=True)
        cap = self.config.model.logits_soft_cap
        return logits_of(hidden, self.outer.head, cap=cap, layout=self.outer.layout)

    def hidden(
        self, tokens: Array, side: Side, keys: Array | None = None
    ) -> tuple[Array, RouterMetrics]:
        """As `Mixtral.hidden`; `keys` are for dropout, `[batch, words]`."""
        self._check_batch(tokens, side)
        batches = self.runner.batches
        read = jax.tree.map(batches.arrange, (tokens, self._early_side(side, keys)))
        x = self._embed((self.outer.table, self.outer.early_layers), read, batches.axes)
        x, metrics = self.run_layers(x, side, keys=keys)
        return self._last_norm(self.outer.scale, x), RouterMetrics.unpacked(metrics)

    def _last_norm(self, scale: PyTree, x: Array) -> Array:
        """What the head reads, divided by `logits_divisor` here, where arrays are smaller."""
        return _times(self.outer.norm(scale, x), 1.0 / self.config.model.logits_divisor)

    def loss(
        self, tokens: Array, targets: Array, weights: Array, side: Side, key: Array | None
    ) -> Loss:
        """As `Mixtral.loss`."""
        self._check_batch(tokens, side)
        _check_array("targets", targets, tokens.shape)
        _check_array("weights", weights, tokens.shape, kind=jnp.floating)
        segments = side.get("segment_ids") is not None
        self.config.check_objective(ambient_mesh().stage, segments=segments)
        train = self.config.for_batch(*tokens.shape).train
        keys = None
        if key is not None and self.config.model.dropout_rate:
            keys = sequence_keys(key, tokens.shape[0])
        if self.config.pipeline.schedule == "1f1b":
            return self._loss_by_one_f_one_b(tokens, Targets(targets, weights), side, keys)
        hidden, router = self.hidden(tokens, side, keys)
        batches = self.runner.batches
        wanted = Targets(batches.arrange(targets), batches.arrange(weights))
        entropy_of = self._entropy(self.outer.layout, batches.axes, train.loss_chunks)
        loss = entropy = entropy_of(hidden, self.outer.head, wanted)
        if train.load_balance_weight:
            loss = loss + train.load_balance_weight * router.load_balance
        if train.router_z_loss_weight:
            loss = loss + train.router_z_loss_weight * router.z_loss
        return loss, (entropy, router)

    def _loss_by_one_f_one_b(
        self, tokens: Array, wanted: Targets, side: Side, keys: Array | None
    ) -> Loss:
        """As `loss`, with forward and backward work of microbatches in the same ticks."""
        assert self.run_loss is not None, "1F1B runs in a pipeline alone"
        batches = self.runner.batches
        axes = batches.axes[1:]  # of one microbatch
        train, model = self.config.for_batch(*tokens.shape).train, self.config.model
        sequences = jax.eval_shape(batches.arrange, tokens).shape[1:]
        shape = (*sequences, model.embed_dim)
        head, layout = losses.hold_columns(self.outer.head, shape, axes, self.outer.layout)
        of_metrics = loss_weights(
            train.load_balance_weight, train.router_z_loss_weight, model.num_experts
        )
        # The loop knows no cotangent yet, and all gradients in it are those of the lifted loss. In
        # the dtype of the parameters they add up.
        narrow = "float16" if "float16" in (model.dtype, model.param_dtype) else model.dtype
        lift = losses.lift_of(jnp.asarray(wanted.weights), narrow, summed=True)

        def enter(weights: PyTree, read: tuple[Array, Side]) -> Array:
            return self._embed(weights, read, axes)

        entropy_of = self._entropy(layout, axes, train.loss_chunks_of(batches.microbatches))

        def leave(last: tuple[PyTree, Array], x: Array, wanted: Targets) -> Array:
            scale, head = last
            return entropy_of(self._last_norm(scale, x), head, wanted)

        early = self.outer.early_layers
        if self.outer.early is not None:
            early = self.outer.early.shared_by_stages(early)
        first, last = (self.outer.table, early), (self.outer.scale, head)
        model_ends = ModelEnds(enter, first, leave, last, lift)
        inputs = ((tokens, self._early_side(side, keys)), wanted)
        loss, (entropy, metrics) = self.run_loss(
            model_ends, inputs, side, keys=keys, metric_weights=of_metrics
        )
        return loss, (entropy, RouterMetrics.unpacked(metrics))

    def _early_side(self, side: Side, keys: Array | None) -> Side:
        return {} if self.outer.early is None else with_keys(side, keys)

    def _embed(
        self, weights: PyTree, read: tuple[Array, Side], batch_axes: tuple[str, ...]
    ) -> Array:
        """What the layers of the pipeline read, sharded by the logical axes `batch_axes`."""
        (table, layers), (tokens, side) = weights, read
        spec = self.runner.layout.spec(*batch_axes, None, None)
        x = constrain(self.outer.embed(table, tokens, spec), spec)
        x = _times(x, self.config.model.embedding_scale)
        return x if self.outer.early is None else self.outer.early(layers, x, side, batch_axes)

    def _entropy(
        self, layout: Layout, batch_axes: tuple[str, ...], chunks: int
    ) -> Callable[[Array, Array, Targets], Array]:
        """(hidden states sharded by `batch_axes`, head, targets) to the weighted cross-entropy."""
        model = self.config.model
        options = losses.LossOptions(chunks, model.logits_soft_cap, model.vocab_size)
        return functools.partial(
            chunked_cross_entropy, batch_axes=batch_axes, options=options, layout=layout
        )

    def _check_batch(self, tokens: Array, side: Side) -> None:
        _check_array("tokens", tokens, None)
        for name, array in side.items():
            if array is not None:
                _check_array(name, array, tokens.shape)
        self.config.for_batch(tokens.shape[0]).check_mesh(ambient_mesh(), tokens.shape[1])


def _times(x: Array, scale: float) -> Array:
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def _check_array(
    name: str, array: object, shape: tuple[int, ...] | None, *, kind: type[np.generic] = jnp.integer
) -> None:
    """Raises InputError unless an argument of a model is such an array.

    `shape` is None for the tokens, whose shape others must have.
    """
    dtype, actual = getattr(array, "dtype", None), getattr(array, "shape", ())
    numbers, cast = ("integers", "int32") if kind is jnp.integer else ("floats", "float32")
    must = "[batch, seq]" if shape is None else f"{[*shape]}, one for each {_ONE[len(shape)]}"
    if dtype is None:
        cure = "give an array, as by jnp.asarray"
    elif not jnp.issubdtype(dtype, kind):
        cure = f"cast them, as by {name}.astype({cast!r})"
    elif shape is None and len(actual) != 2:
        cure = "one sequence is given as tokens[None]"
    elif shape is not None and actual != shape:
        cure = f"give `{name}` that shape"
    else:
        return
    raise InputError(
        f"`{name}` of a model is {kind_of(array)} and must be {numbers} {must}; {cure}"
    )


_ONE = {1: "sequence", 2: "token"}  # what each number of an array with so many axes belongs to


def early_layers(config: Config, layout: Layout, copied: Layout) -> EarlyLayers:
    """What runs the dense first layers of a model, see `EarlyLayers`."""
    model, remat = config.model, remat_of(config.pipeline.remat)
    return EarlyLayers(model.num_dense_layers, model.num_pipeline_layers, layout, copied, remat)


class Mixtral(nnx.Module):
    """A decoder-only transformer of Mixtral, Llama or DeepSeek, pipelined when the mesh has stages.

    - `rngs`: its `params` stream gives the initial values, which do not depend on the mesh.
    - `layout`: which mesh axes each logical axis is sharded over.

    Made and called under `jax.set_mesh`, its parameters are created in their shardings; without a
    mesh it is an ordinary single-device model. All layers are one stacked module in
    `self.pipeline`, see `CircularPipeline`, except for dense layers before layers with experts,
    which are one in `self.dense_layers`. Raises InputError when the mesh cannot hold the weights; a
    batch is checked when the model is called with it.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, layout: Layout = Layout()) -> None:
        config.check_weights(ambient_mesh())
        self.config = config
        self.cached = False  # whether the layers have caches, which a call writes
        model, weights = config.model, weight_options(config)
        layout = layout.for_vocabulary(model.vocab_size, model.embed_dim, weights.zero1)
        self.embedding = Embed(model, rngs=rngs, layout=layout)
        remat = remat_of(config.pipeline.remat)

        def layer_of(model: ModelConfig) -> Callable[[nnx.Rngs], DecoderLayer]:
            return lambda rngs: DecoderLayer(model, rngs=rngs, layout=layout, remat=remat)

        kinds = [layer_of(kind) for kind in model.of_kinds]
        self.pipeline = pipeline_of(config, kinds, weights, rngs=rngs, layout=layout)
        self.layout = self.pipeline.runner.layout
        self.early = None
        if model.num_dense_layers:
            self.early = early_layers(config, layout, self.layout)
            self.dense_layers = self.early.make(layer_of(model.of_dense_layers), rngs)
        self.norm = RMSNorm(model, rngs=rngs, layout=layout)
        self.head = None if model.tied_embeddings else self._new_head(rngs)

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        at: Array | None = None,
    ) -> Array:
        """Token ids `[batch, seq]` to float32 logits `[batch, seq, vocab]`.

        - `positions`: `[batch, seq]` integers; None for a token's place in the sequence.
        - `segment_ids`: `[batch, seq]` integers; None if each row is one segment, and then no mask
          array is made.
        - `at`: int32 `[batch]`, the place of the one token of each sequence whose logits, `[batch,
          1, vocab]`, are computed; None for all tokens.
        """
        side = {"positions": positions, "segment_ids": segment_ids}
        return self._decoder().logits(tokens, side, at)

    def hidden(
        self, tokens: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> tuple[Array, RouterMetrics]:
        """The output of the final norm, and what the routers report; arguments as in a call.

        The output has the axes `self.pipeline.batches.axes`: it is `[batch, seq, embed]`, or on a
        mesh with stages `[microbatches, microbatch, seq, embed]` with the first axis sharded over
        `stage`; where the layers run in copies (`Layout.copy`), the batch or microbatch is preceded
        by an axis of copies.
        """
        side = {"positions": positions, "segment_ids": segment_ids}
        return self._decoder().hidden(tokens, side)

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        key: Array | None = None,
        shards: "Mixtral | None" = None,
    ) -> Loss:
        """The loss to minimise, and a pair: the cross-entropy in it, and what the routers report.

        - `tokens`, `targets`, `weights`, `positions`, `segment_ids`: `[batch, seq]`.
        - `key`: one random key for dropout; None for no dropout.
        - `shards`: with `train.shard_optimizer_over_data`, the parameters from `shards()`.
          Differentiate with respect to these: the gradient then arrives in their sharding, by
          reduce-scatters.

        Cross-entropy is Σ weights · entropy of the targets; the router's losses are added with the
        weights `train.load_balance_weight` and `train.router_z_loss_weight`. With
        `pipeline.schedule="1f1b"` the forward pass computes the gradient with respect to the
        parameters too, and the two parts cannot be differentiated. Raises InputError for sequences
        that `train.loss_chunks` does not divide, and for the gradient with respect to `weights`.
        """
        side = {"positions": positions, "segment_ids": segment_ids}
        return self._decoder(shards).loss(tokens, targets, weights, side, key)

    @property
    def zero1(self) -> tuple[str, ...]:
        """Mesh axes of ZeRO-1, over which gradients and optimizer state are sharded too, or ()."""
        return self.pipeline.runner.weights.zero1

    def shards(self) -> "Mixtral":
        """The parameters in the sharding of the optimizer's state, over the axes of `zero1` too."""
        return place_by(self, self.layout.zero1(self.zero1))

    def whole(self) -> "Mixtral":
        """The inverse of `shards`: the parameters gathered over the axes of `zero1`."""
        # In auto mode, placing the shards first keeps the compiler from moving the gather up into
        # the optimizer's update.
        return place_by(self.shards(), self.layout)

    def _new_head(self, rngs: nnx.Rngs) -> nnx.Param[Array]:
        model, initial = self.config.model, nnx.initializers.lecun_normal()
        shape, axes = (model.embed_dim, model.vocab_size), ("embed_of_vocab", "vocab")
        return parameter(rngs, self.layout, model.param_dtype, initial, shape, axes)

    def _decoder(self, shards: "Mixtral | None" = None) -> Decoder:
        """The decoder over this module's weights, or over `shards` of them (see `loss`)."""
        runner, layout = self.pipeline.runner, self.layout
        embedding, norm, head = self.embedding, self.norm, self.head
        early: PyTree = self.dense_layers if self.early else None
        layers: PyTree = self.pipeline.placed_layers
        if shards is not None:
            if not self.zero1:
                raise InputError(
                    "the loss was given shards of the parameters, and this model does not shard "
                    "gradients: set train.shard_optimizer_over_data on a mesh with data=2 or more, "
                    "or leave `shards` out"
                )
            # Embedding and head are used in the shards of ZeRO-1: tokens are sent along `data`, or
            # the head's kernel one more time, and each gradient is computed where the optimizer
            # needs it. The scale of the norm is small, so it is gathered; so are the few layers
            # before the pipeline.
            layout = layout.zero1(self.zero1)
            embedding = with_layout(shards.embedding, layout)
            norm, head = place_by(shards.norm, self.layout), shards.head
            if self.early is not None:
                early = place_by(shards.dense_layers, self.layout)
            layers = Zero1Layers(layers, shards.pipeline.layers)
        table = embedding.embedding[...]
        outer = OuterLayers(
            embed=lambda table, tokens, spec: table(tokens, out=spec),
            norm=lambda scale, x: scale(x),
            table=embedding,
            scale=norm,
            head=head_of_table(table, self.config.model) if head is None else head[...],
            layout=layout,
            early=self.early,
            early_layers=early,
        )
        run_layers: Callable[..., tuple[Array, PyTree]] = functools.partial(runner.run, layers)
        if self.cached:
            run_layers = self.pipeline.run
        run_loss = functools.partial(runner.loss, layers)
        return Decoder(self.config, runner, outer, run_layers, run_loss)
