"""The decoder: embedding, layers through the pipeline or one after the other, norm, head."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import Config
from nnx_pipeline.mesh import ambient_mesh
from nnx_pipeline.modules import DecoderLayer, Embed, Parts, RMSNorm
from nnx_pipeline.ops.dropout import sequence_keys
from nnx_pipeline.ops.head import logits_of
from nnx_pipeline.ops.router import or_zero
from nnx_pipeline.pipeline import create_pipeline
from nnx_pipeline.remat import POLICIES
from nnx_pipeline.sharding import Layout, parameter, place_by, with_layout


class _Ends(NamedTuple):
    """What is before and after the layers, and the layout of its weights."""

    embedding: Embed
    norm: RMSNorm
    head: nnx.Param
    layout: Layout


class Mixtral(nnx.Module):
    """A decoder-only transformer of Mixtral or Llama, pipelined when the mesh has stages.

    Made and called under `jax.set_mesh`, its parameters are born in their shardings; without a mesh
    it is an ordinary single-device model. The layers are one stacked module in `self.pipeline`, see
    `CircularPipeline`. The initial values depend on `rngs` and not on the mesh.

    Raises InputError when the mesh cannot hold the weights; a batch is checked when it is given.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
    ) -> None:
        config.check_weights(ambient_mesh())
        self.config, self.parts = config, parts
        model = config.model
        self.embedding = Embed(model, rngs=rngs, layout=layout)

        def layer(rngs: nnx.Rngs) -> DecoderLayer:
            remat = POLICIES[config.pipeline.remat]
            return DecoderLayer(model, rngs=rngs, layout=layout, parts=parts, remat=remat)

        self.pipeline = create_pipeline(
            config,
            layer,
            rngs=rngs,
            layout=layout,
            over=parts.over_stages,
            loop_parts=parts.loop,
        )
        self.layout = self.pipeline.runner.layout
        self.norm = RMSNorm(model, rngs=rngs, layout=layout, parts=parts)
        self.head = parameter(
            rngs,
            nnx.initializers.lecun_normal(),
            (model.embed_dim, model.vocab_size),
            model.param_dtype,
            ("embed", "vocab"),
            layout,
        )

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """Token ids `[batch, seq]` to float32 logits `[batch, seq, vocab]`.

        positions, segment_ids: `[batch, seq]` integers. Without positions a token's position is its
        place in the sequence; without segment ids a row is one sequence and no mask array is made.
        """
        hidden, _ = self.hidden(tokens, positions=positions, segment_ids=segment_ids)
        hidden = self.pipeline.batches.as_batch(hidden, tokens.shape[0])
        return logits_of(hidden, self.head[...], layout=self.layout)

    def hidden(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> tuple[Array, Array]:
        """The normed output of the last layer, and the router's load-balance loss.

        The output is laid out by `self.pipeline.batches.axes`: `[batch, seq, embed]`, or
        `[microbatches, microbatch, seq, embed]` with the first axis over `stage` on a mesh with
        stages. The loss is averaged over layers and microbatches.
        """
        self._check_batch(tokens.shape[0])
        side = {"positions": positions, "segment_ids": segment_ids}
        return self._hidden(tokens, side, None, self._ends(None), None)

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        key: Array | None = None,
        owned: "Mixtral | None" = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """The loss to minimise, and its two parts: cross-entropy and load balance.

        All arguments are `[batch, seq]`. Cross-entropy is Σ weights · entropy of the targets; the
        router's load-balance loss counts `train.load_balance_weight` times. The gradient is that of
        the parameters; one with respect to `weights` is refused. With `pipeline.schedule="1f1b"` it
        is computed while the microbatches pass, and neither part has one. key: for dropout, which
        is left out without one.

        owned: with `train.shard_optimizer_over_data`, the parameters as `owned()` gives them: the
        gradient is then asked of these and arrives in their placement, by reduce-scatters.
        """
        self._check_batch(tokens.shape[0])
        self.config.check_objective(ambient_mesh().stage)
        side = {"positions": positions, "segment_ids": segment_ids}
        keys = None
        if key is not None and self.config.model.dropout_rate:
            keys = sequence_keys(key, tokens.shape[0])
        if self.config.pipeline.schedule == "1f1b":
            return self._loss_by_one_f_one_b((tokens, targets, weights), side, keys, owned)
        ends = self._ends(owned)
        hidden, balance = self._hidden(tokens, side, keys, ends, owned)
        targets, weights = map(self.pipeline.batches.arrange, (targets, weights))
        axes = self.pipeline.batches.axes
        entropy = self._entropy(ends.head, hidden, targets, weights, axes, ends.layout)
        share = self.config.train.load_balance_weight
        return entropy + share * balance if share else entropy, (entropy, balance)

    def owned(self) -> "Mixtral":
        """The parameters as their owners hold them: spread over `data` besides (`Layout.owned`)."""
        return place_by(self, self.layout.owned(self.pipeline.runner.own))

    def stored(self) -> "Mixtral":
        """The inverse of `owned`: gathered over `data`."""
        # In auto mode the first placement keeps the gather from moving up into the update.
        return place_by(self.owned(), self.layout)

    def _ends(self, owned: "Mixtral | None") -> _Ends:
        """Embedding and head are looked up and multiplied as they are owned: what travels along
        `data` is then tokens, or the kernel once more, and each gradient arises at its owner."""
        if owned is None:
            return _Ends(self.embedding, self.norm, self.head, self.layout)
        layout = self.layout.owned(self.pipeline.runner.own)
        norm = place_by(owned.norm, self.layout)
        return _Ends(with_layout(owned.embedding, layout), norm, owned.head, layout)

    def _hidden(
        self,
        tokens: Array,
        side: dict[str, Array | None],
        keys: Array | None,
        ends: _Ends,
        owned: "Mixtral | None",
    ) -> tuple[Array, Array]:
        pipeline = self.pipeline
        spec = self.layout.spec(*pipeline.batches.axes, None, None)
        x = self.parts.constrain(ends.embedding(pipeline.batches.arrange(tokens), out=spec), spec)
        layers = None if owned is None else owned.pipeline.layers
        x, balance = pipeline.run(x, side, keys=keys, owned=layers)
        return ends.norm(x), or_zero(balance)

    def _loss_by_one_f_one_b(
        self,
        batch: tuple[Array, Array, Array],
        side: dict[str, Array | None],
        keys: Array | None,
        owned: "Mixtral | None",
    ) -> tuple[Array, tuple[Array, Array]]:
        """batch: tokens, targets and weights."""
        tokens, *wanted = batch
        ends = self._ends(owned)
        batch_axes = self.pipeline.batches.axes[1:]
        spec = self.layout.spec(*batch_axes, None, None)

        def enter(embedding: Embed, tokens: Array) -> Array:
            return self.parts.constrain(embedding(tokens, out=spec), spec)

        def leave(last: tuple[RMSNorm, nnx.Param], x: Array, inputs: tuple[Array, Array]) -> Array:
            norm, head = last
            return self._entropy(head, norm(x), *inputs, batch_axes, ends.layout)

        loss, (entropy, balance) = self.pipeline.loss(
            enter,
            leave,
            (ends.embedding, (ends.norm, ends.head)),
            (tokens, tuple(wanted)),
            side,
            keys=keys,
            metric_weights=self.config.train.load_balance_weight,
            owned=None if owned is None else owned.pipeline.layers,
        )
        return loss, (entropy, or_zero(balance))

    def _entropy(
        self,
        head: nnx.Param,
        hidden: Array,
        targets: Array,
        weights: Array,
        batch_axes: tuple[str, ...],
        layout: Layout,
    ) -> Array:
        return self.parts.loss(
            hidden,
            head[...],
            targets,
            weights,
            batch_axes=batch_axes,
            chunks=self.config.train.loss_chunks,
            layout=layout,
        )

    def _check_batch(self, batch: int) -> None:
        self.config.for_batch(batch).check_mesh(ambient_mesh())
