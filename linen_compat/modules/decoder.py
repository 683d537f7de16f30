"""The decoder and the whole model, in the layouts in which MaxText stores its layers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, PyTree

from linen_compat.formats._names import check_names, check_one_kind, is_apart
from linen_compat.modules._stacked import EarlyTree
from linen_compat.modules.decoder_layers import layer_class
from linen_compat.modules.embedding import Embed
from linen_compat.modules.feed_forward import FAN_IN
from linen_compat.modules.norm import RMSNorm
from linen_compat.modules.parameters import Configured, Kernel, unboxed
from linen_compat.modules.pipeline import CircularPipeline, Pipeline
from nnx_pipeline import Config, InputError, Layout
from nnx_pipeline.config._remat import LAYER_INPUT, LAYER_METRICS, named, remat_of
from nnx_pipeline.lab.errors import counted, one_of
from nnx_pipeline.lab.mesh import ambient_mesh
from nnx_pipeline.modules import decoder as functional
from nnx_pipeline.ops._head import head_of_table
from nnx_pipeline.ops._router import RouterMetrics
from nnx_pipeline.pipeline._runner import Runner, make_runner
from nnx_pipeline.pipeline._stack import make_stack
from nnx_pipeline.pipeline.create import weight_options
from nnx_pipeline.pipeline.layers import with_keys
from nnx_pipeline.pipeline.metrics import over_layers, values
from nnx_pipeline.pipeline.stage.layers import NumberedLayer, Side, call_layer

LayerLayout = Literal["unscanned", "scanned", "pipelined"]
# (layer, x, number of the layer) to (x, metrics)
Visit = Callable[[nn.Module, Array, Array], tuple[Array, PyTree]]
LAYER_LAYOUTS = ("unscanned", "scanned", "pipelined")


class Decoder(Configured):
    """Layers, norm and head: the model after the embedding, which is passed to it.

    - `layer_layout`: where the parameters of the layers are. `unscanned`: one subtree per layer,
      `layers_0 …`. `scanned`: one subtree `layers`, with the layers along the second axis of every
      array. `pipelined`: in `pipeline_module` (see `CircularPipeline`), with the stages of the
      mesh. None is MaxText's default: pipelined on a mesh with stages, else scanned. DeepSeek's
      layers with experts are called `moe_layers`; its dense layers are in `dense_layers_0 …`, or
      scanned in `dense_layers`.
    - `layout`: the mesh axes over which each logical axis is sharded.

    `init` and `apply` it under the same `jax.set_mesh`, or both without one.
    """

    config: Config
    layer_layout: LayerLayout | None = None
    layout: Layout = Layout()

    def setup(self) -> None:
        config, model = self.config, self.config.model
        check_names(model)
        check_one_kind(model, "Linen")
        where = self._where()
        kind = layer_class(model)
        options = (model, self.layout, remat_of(config.pipeline.remat))
        if where == "pipelined":
            pipeline = Pipeline if config.pipeline.num_repeats == 1 else CircularPipeline
            self.pipeline_module = pipeline(
                config.pipeline,
                kind(*options, parent=None),  # unbound: the pipeline makes the parameters
                model.num_pipeline_layers,
                self.layout,
                weight_options(config),
            )
        else:
            layers = [kind(*options) for _ in range(model.num_pipeline_layers)]
            setattr(self, self._group, kind(*options) if where == "scanned" else layers)
        if model.num_dense_layers:
            self.dense_layers = self._early_tree.declared(self)
        self.decoder_norm = RMSNorm(model, self.layout)
        if not model.tied_embeddings:
            shape, names = (model.embed_dim, model.vocab_size), ("embed_vocab", "vocab")
            self.logits_dense = Kernel(self.layout, model.param_dtype, FAN_IN, shape, names)

    def __call__(
        self,
        embedding: Embed,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """The logits of tokens that `embedding` looks up; see `Transformer.__call__`."""
        side = {"positions": positions, "segment_ids": segment_ids}
        return self.functions(embedding).logits(tokens, side)

    def functions(self, embedding: Embed) -> functional.Decoder:
        """The decoder as functions of arrays, over this module's parameters."""
        if not self.is_initializing():
            self._check_parameters(self.variables.get("params", {}))
        runner, table, model = self._runner, embedding.embedding, self.config.model
        early: dict[str, PyTree] = {}
        if model.num_dense_layers:
            early["early"] = functional.early_layers(self.config, self.layout, runner.layout)
            early["early_layers"] = self._early_tree.stacked(self.dense_layers)
        outer = functional.OuterLayers(
            embed=lambda table, tokens, spec: embedding.look_up(table, tokens, out=spec),
            norm=lambda scale, x: self.decoder_norm.scaled_by(scale, x),
            table=table,
            scale=self.decoder_norm.scale,
            head=head_of_table(table, model) if model.tied_embeddings else self.logits_dense(),
            layout=runner.layout,
            **early,
        )
        if self._where() != "pipelined":
            return functional.Decoder(self.config, runner, outer, self._run_layers, None)
        pipeline = self.pipeline_module
        run_loss = functools.partial(pipeline.loss, width=(model.embed_dim,))
        return functional.Decoder(self.config, runner, outer, pipeline.run, run_loss)

    @property
    def _early_tree(self) -> EarlyTree:
        remat, unscanned = remat_of(self.config.pipeline.remat), self._where() == "unscanned"
        return EarlyTree(self.config.model, self.layout, remat, unscanned)

    @property
    def _group(self) -> str:
        """MaxText's name of the pipeline's layers in other layouts."""
        return "moe_layers" if is_apart(self.config.model) else "layers"

    def _run_layers(
        self, x: Array, side: Side, *, keys: Array | None = None
    ) -> tuple[Array, PyTree]:
        """Runs layers that are not in a pipeline, one after the other on the whole batch."""
        batches = self._runner.batches
        side = jax.tree.map(batches.arrange, with_keys(side, keys))
        scanned = self._where() == "scanned"
        stack = make_stack(self.config.model.num_pipeline_layers, stages=1, repeats=1)
        microbatches, split = batches.microbatches, self._runner.split({})

        def visit(layer: nn.Module, x: Array, number: Array) -> tuple[Array, PyTree]:
            numbered = NumberedLayer(layer, number, [])
            x = named(x, LAYER_INPUT)
            return call_layer(
                x, numbered, side, stack=stack, microbatches=microbatches, split=split
            )

        policy = remat_of(self.config.pipeline.remat).policy()
        # In the body of a scan there is nothing to merge a recomputation with.
        remat = cast(Callable[..., Visit], nn.remat)
        call = visit if policy is None else remat(visit, policy=policy, prevent_cse=not scanned)

        def body(layer: nn.Module, x: Array, number: Array) -> tuple[Array, PyTree]:
            x, usage = call(layer, x, number)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), usage)

        x, (metrics, *_) = (self._scanned if scanned else self._unscanned)(x, body)
        return x, values(over_layers(metrics))

    def _scanned(self, x: Array, visit: Visit) -> tuple[Array, PyTree]:
        scan = cast(Callable[..., Visit], nn.scan)
        scanned = scan(
            visit,
            variable_axes={"params": 1},  # where MaxText's `param_scan_axis` puts the layers
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: self._group},
        )
        numbers = jnp.arange(self.config.model.num_pipeline_layers, dtype=jnp.int32)
        return scanned(getattr(self, self._group), x, numbers)

    def _unscanned(self, x: Array, visit: Visit) -> tuple[Array, PyTree]:
        usages = []
        for number, layer in enumerate(getattr(self, self._group)):
            x, usage = visit(layer, x, jnp.int32(number))
            usages.append(usage)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *usages)

    @property
    def _runner(self) -> Runner:
        config, number = self.config, self.config.model.num_pipeline_layers
        runner = make_runner(
            config.pipeline, num_layers=number, layout=self.layout, weights=weight_options(config)
        )
        return dataclasses.replace(runner, at_once=self._where() != "pipelined")

    def _check_parameters(self, params: Mapping[str, PyTree]) -> None:
        """Raises InputError for layers in another layout or number, more plainly than Flax."""
        where, model, group = self._where(), self.config.model, self._group
        layers = model.num_pipeline_layers
        marks = {"pipelined": "pipeline_module", "scanned": group, "unscanned": f"{group}_0"}
        stored = next((name for name in marks if marks[name] in params), where)
        if stored != where:
            raise InputError(
                f"params hold the layers as {stored} ({marks[stored]}), but "
                f"layer_layout={where!r}; choose layer_layout={stored!r} or convert the parameters"
            )
        count = sum(name.startswith(f"{group}_") for name in params)
        if where == "scanned" and group in params:
            kernel = params[group]["self_attention"]["out"]["kernel"]
            count = unboxed(kernel).shape[1]
        dense = f" - num_dense_layers={model.num_dense_layers}" if model.num_dense_layers else ""
        if where != "pipelined" and count != layers:  # else the pipeline checks its own
            raise InputError(
                f"params hold {counted(count, 'layer')} and "
                f"model.num_layers={model.num_layers}{dense}; make them equal"
            )

    def _where(self) -> str:
        """The layout of the layers. Raises InputError where mesh or config need another."""
        stages, pipeline = ambient_mesh().stage, self.config.pipeline
        where = self.layer_layout or ("pipelined" if stages > 1 else "scanned")
        one_of("layer_layout", where, LAYER_LAYOUTS)
        if self.config.train.shard_optimizer_over_data:
            raise InputError(
                "train.shard_optimizer_over_data=True is for nnx_pipeline.Mixtral and not for "
                "Linen modules; set it to False"
            )
        if where != "pipelined" and (stages > 1 or pipeline.accumulates):
            raise InputError(
                f"layer_layout={where!r} runs the layers one after the other on all microbatches "
                f"at once, and the mesh has stage={stages} with pipeline.schedule="
                f"{pipeline.schedule}, pipeline.fsdp_gather={pipeline.fsdp_gather} and "
                f"pipeline.backward={pipeline.backward}; choose layer_layout='pipelined', or "
                "stage=1 and leave those options out"
            )
        return where


class Transformer(Configured):
    """MaxText's model over the functions of `nnx_pipeline.Mixtral`, with the same results.

    - `layer_layout`: see `Decoder`.
    - `layout`: the mesh axes over which each logical axis is sharded.

    `params` has MaxText's names, shapes and logical axes. `init` returns its arrays in metadata
    boxes; `apply` takes them boxed or not. Raises InputError when the config does not divide over
    the mesh, or layer_layout does not fit.
    """

    config: Config
    layer_layout: LayerLayout | None = None
    layout: Layout = Layout()

    def setup(self) -> None:
        model = self.config.model
        layout = self.layout.for_vocabulary(model.vocab_size, model.embed_dim)
        self.token_embedder = Embed(model, layout)
        self.decoder = Decoder(self.config, self.layer_layout, layout)

    def __call__(
        self, tokens: Array, *, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """Token ids `[batch, seq]` to float32 logits `[batch, seq, vocab]`.

        - `positions`: `[batch, seq]` integers; None for a token's place in the sequence.
        - `segment_ids`: `[batch, seq]` integers; without them a row is one sequence.
        """
        side = {"positions": positions, "segment_ids": segment_ids}
        return self.decoder(self.token_embedder, tokens, **side)

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, tuple[Array, RouterMetrics]]:
        """The loss to minimise, and a pair: the cross-entropy in it, and what the routers report.

        Call it as `apply(variables, …, method="loss")`. Arguments and result are as in
        `nnx_pipeline.Mixtral.loss`, without `shards`.

        - `key`: for dropout, which is left out without one. Flax's own generators (`rngs=`) are not
          read: the masks are the same as in `nnx_pipeline`.
        """
        side = {"positions": positions, "segment_ids": segment_ids}
        functions = self.decoder.functions(self.token_embedder)
        return functions.loss(tokens, targets, weights, side, key)
