"""The decoder and the whole model, in the layouts in which MaxText stores its layers."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from linen_compat.modules.decoder_layers import LlamaDecoderLayer, MixtralDecoderLayer
from linen_compat.modules.embedding import Embed
from linen_compat.modules.feed_forward import FAN_IN
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import Kernel, unboxed
from linen_compat.modules.pipeline import CircularPipeline, Pipeline, Side
from nnx_pipeline import Config, InputError, Layout
from nnx_pipeline.errors import one_of
from nnx_pipeline.mesh import ambient_mesh
from nnx_pipeline.ops.dropout import sequence_keys
from nnx_pipeline.ops.head import logits_of
from nnx_pipeline.ops.loss import chunked_cross_entropy
from nnx_pipeline.ops.router import or_zero
from nnx_pipeline.pipeline.layers import call_layer, with_keys
from nnx_pipeline.pipeline.metrics import over_layers, values
from nnx_pipeline.pipeline.runner import Runner, make_runner
from nnx_pipeline.remat import LAYER_INPUT, LAYER_METRICS, POLICIES, named
from nnx_pipeline.sharding import constrain

LayerLayout = Literal["unscanned", "scanned", "pipelined"]
LAYER_LAYOUTS = ("unscanned", "scanned", "pipelined")


class Decoder(nn.Module):
    """Layers, norm and head: everything after the embedding, which it is handed.

    layer_layout: where its layers are. `unscanned`: each in a subtree of its own, `layers_0 …`.
    `scanned`: one subtree `layers`, their axis the second of every array. `pipelined`: in
    `pipeline_module`, see `CircularPipeline`; the stages are those of the mesh. None: as MaxText
    does by default, pipelined on a mesh with stages, else scanned.

    `init` and `apply` it under the same `jax.set_mesh`, or without one.
    """

    config: Config
    layer_layout: LayerLayout | None = None
    layout: Layout = Layout()

    def setup(self) -> None:
        config, model = self.config, self.config.model
        where = self._where()
        kind = MixtralDecoderLayer if model.num_experts > 1 else LlamaDecoderLayer
        options = (model, self.layout, POLICIES[config.pipeline.remat])
        if where == "pipelined":
            pipeline = Pipeline if config.pipeline.num_repeats == 1 else CircularPipeline
            self.pipeline_module = pipeline(
                config.pipeline,
                kind(*options, parent=None),
                model.num_layers,
                layout=self.layout,
                dtype=model.dtype,
                grad_dtype=config.train.grad_dtype,
            )
        elif where == "scanned":
            self.layers = kind(*options)
        else:
            self.layers = [kind(*options) for _ in range(model.num_layers)]  # type: ignore
        self.decoder_norm = RMSNorm(model, self.layout)
        self.logits_dense = Kernel(
            FAN_IN,
            (model.embed_dim, model.vocab_size),
            model.param_dtype,
            ("embed_vocab", "vocab"),
            self.layout,
        )

    def __call__(
        self,
        embedding: Embed,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """As `Transformer.__call__`."""
        side = {"positions": positions, "segment_ids": segment_ids}
        runner = self._checked_runner(tokens.shape[0])
        hidden, _ = self._hidden(embedding, tokens, side, None)
        hidden = runner.batches.as_batch(hidden, tokens.shape[0])
        return logits_of(hidden, self.logits_dense(), layout=runner.layout)

    def loss(
        self,
        embedding: Embed,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """As `Transformer.loss`."""
        batches = self._checked_runner(tokens.shape[0]).batches
        self.config.check_objective(ambient_mesh().stage)
        side = {"positions": positions, "segment_ids": segment_ids}
        keys = None
        if key is not None and self.config.model.dropout_rate:
            keys = sequence_keys(key, tokens.shape[0])
        if self.config.pipeline.schedule == "1f1b":
            batch = (tokens, targets, weights)
            return self._loss_by_one_f_one_b(embedding, batch, side, keys)
        hidden, balance = self._hidden(embedding, tokens, side, keys)
        targets, weights = map(batches.arrange, (targets, weights))
        entropy = self._entropy(self.logits_dense(), hidden, targets, weights, batches.axes)
        share = self.config.train.load_balance_weight
        return entropy + share * balance if share else entropy, (entropy, balance)

    def _hidden(
        self, embedding: Embed, tokens: Array, side: Side, keys: Array | None
    ) -> tuple[Array, Array]:
        """The normed output of the last layer, laid out by `batches.axes`, and the load balance."""
        runner = self._runner
        batches = runner.batches
        spec = runner.layout.spec(*batches.axes, None, None)
        x = constrain(embedding(batches.arrange(tokens), out=spec), spec)
        where = self._where()
        if where == "pipelined":
            x, balance = self.pipeline_module.run(x, side, keys=keys)
        else:
            side = jax.tree.map(batches.arrange, with_keys(side, keys))
            run = self._scanned if where == "scanned" else self._unscanned
            x, metrics = run(x, side, batches.microbatches)
            balance = values(over_layers(metrics))
        return self.decoder_norm(x), or_zero(balance)

    def _scanned(self, x: Array, side: Side, microbatches: int) -> tuple[Array, Any]:
        visit = self._visit(side, microbatches, in_scan=True)
        scan = nn.scan(
            visit,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(self.layers, x, jnp.arange(self.config.model.num_layers, dtype=jnp.int32))

    def _unscanned(self, x: Array, side: Side, microbatches: int) -> tuple[Array, Any]:
        visit = self._visit(side, microbatches, in_scan=False)
        usages = []
        for number, layer in enumerate(self.layers):
            x, usage = visit(layer, x, jnp.int32(number))
            usages.append(usage)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *usages)

    def _visit(self, side: Side, microbatches: int, *, in_scan: bool) -> Any:
        """(layer, x, its number) to x and the metrics of the layer, with the config's remat."""

        def visit(layer: nn.Module, x: Array, number: Array) -> tuple[Array, Any]:
            return call_layer((layer, number), x, side, microbatches=microbatches)

        policy = POLICIES[self.config.pipeline.remat].policy()
        kept = visit if policy is None else nn.remat(visit, policy=policy, prevent_cse=not in_scan)

        def body(layer: nn.Module, x: Array, number: Array) -> tuple[Array, Any]:
            x, usage = kept(layer, named(x, LAYER_INPUT), number)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), usage)

        return body

    def _loss_by_one_f_one_b(
        self,
        embedding: Embed,
        batch: tuple[Array, Array, Array],
        side: Side,
        keys: Array | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """batch: tokens, targets and weights."""
        tokens, *wanted = batch
        runner = self._runner
        axes = runner.batches.axes[1:]
        spec = runner.layout.spec(*axes, None, None)

        def enter(table: Array, tokens: Array) -> Array:
            return constrain(embedding.look_up(table, tokens, out=spec), spec)

        def leave(last: tuple[Array, Array], x: Array, inputs: tuple[Array, Array]) -> Array:
            scale, head = last
            return self._entropy(head, self.decoder_norm.scaled_by(scale, x), *inputs, axes)

        loss, (entropy, balance) = self.pipeline_module.loss(
            enter,
            leave,
            (embedding.embedding, (self.decoder_norm.scale, self.logits_dense())),
            (tokens, tuple(wanted)),
            side,
            row=(tokens.shape[1], self.config.model.embed_dim),
            keys=keys,
            metric_weights=self.config.train.load_balance_weight,
        )
        return loss, (entropy, or_zero(balance))

    def _entropy(
        self,
        head: Array,
        hidden: Array,
        targets: Array,
        weights: Array,
        batch_axes: tuple[str, ...],
    ) -> Array:
        return chunked_cross_entropy(
            hidden,
            head,
            targets,
            weights,
            batch_axes=batch_axes,
            chunks=self.config.train.loss_chunks,
            layout=self._runner.layout,
        )

    @property
    def _runner(self) -> Runner:
        """How batches are laid out on the ambient mesh."""
        return make_runner(
            self.config.pipeline,
            num_layers=self.config.model.num_layers,
            layout=self.layout,
            dtype=self.config.model.dtype,
            grad_dtype=self.config.train.grad_dtype,
        )

    def _checked_runner(self, batch: int) -> Runner:
        """The runner; InputError when config, batch, mesh and parameters do not fit together."""
        self.config.for_batch(batch).check_mesh(ambient_mesh())
        if not self.is_initializing():
            self._check_parameters(self.variables.get("params", {}))
        return self._runner

    def _check_parameters(self, params: Mapping[str, Any]) -> None:
        """What Flax would not say, or not plainly: layers stored otherwise, or more of them."""
        where, layers = self._where(), self.config.model.num_layers
        marks = {"pipelined": "pipeline_module", "scanned": "layers", "unscanned": "layers_0"}
        stored = next((name for name in marks if marks[name] in params), where)
        if stored != where:
            raise InputError(
                f"params hold the layers {stored} ({marks[stored]}) and layer_layout={where!r}; "
                f"choose layer_layout={stored!r} or convert the parameters"
            )
        found = sum(name.startswith("layers_") for name in params)
        if where == "scanned" and "layers" in params:
            found = unboxed(params["layers"]["pre_self_attention_layer_norm"]["scale"]).shape[1]
        if where != "pipelined" and found != layers:  # else the pipeline checks its own
            raise InputError(
                f"params hold {found} layers and model.num_layers={layers}; make them equal"
            )

    def _where(self) -> str:
        """The layout of the layers; InputError when mesh or config ask for another."""
        stages, schedule = ambient_mesh().stage, self.config.pipeline.schedule
        where = self.layer_layout or ("pipelined" if stages > 1 else "scanned")
        one_of("layer_layout", where, LAYER_LAYOUTS)
        if self.config.train.shard_optimizer_over_data:
            raise InputError(
                "train.shard_optimizer_over_data=True is for nnx_pipeline.Mixtral, whose gradients "
                "arrive at their owners; set it to False"
            )
        if where != "pipelined" and (stages > 1 or schedule == "1f1b"):
            raise InputError(
                f"layer_layout={where!r} runs the layers one after the other on the whole batch, "
                f"and the mesh has stage={stages} with pipeline.schedule={schedule}; choose "
                "layer_layout='pipelined', or stage=1 and the circular schedule"
            )
        return where


class Transformer(nn.Module):
    """MaxText's model over the functions of `nnx_pipeline.Mixtral`, whose results it gives.

    `params` has MaxText's names, shapes and logical axes, in boxes when made by `init`; `apply`
    takes it boxed or not. layer_layout: see `Decoder`.

    Raises InputError when the config does not divide over the mesh, or layer_layout does not fit.
    """

    config: Config
    layer_layout: LayerLayout | None = None
    layout: Layout = Layout()

    def setup(self) -> None:
        self.token_embedder = Embed(self.config.model, self.layout)
        self.decoder = Decoder(self.config, self.layer_layout, self.layout)

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """Token ids `[batch, seq]` to float32 logits `[batch, seq, vocab]`.

        positions, segment_ids: `[batch, seq]` integers. Without positions a token's position is its
        place in the sequence; without segment ids a row is one sequence.
        """
        return self.decoder(
            self.token_embedder, tokens, positions=positions, segment_ids=segment_ids
        )

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """The loss to minimise, and its two parts: cross-entropy and load balance.

        To be called as `apply(variables, …, method="loss")`; arguments and result are those of
        `nnx_pipeline.Mixtral.loss`. key: for dropout, which is left out without one; Flax's own
        generators (`rngs=`) are not read, so that the masks are those of `nnx_pipeline`.
        """
        return self.decoder.loss(
            self.token_embedder,
            tokens,
            targets,
            weights,
            positions=positions,
            segment_ids=segment_ids,
            key=key,
        )
