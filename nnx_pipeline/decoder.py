"""The decoder: embedding, layers through the pipeline or one after the other, norm, head."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_pipeline.config import Config
from nnx_pipeline.errors import InputError
from nnx_pipeline.mesh import ambient_mesh
from nnx_pipeline.modules import DecoderLayer, Embed, Parts, RMSNorm, with_layout
from nnx_pipeline.ops.router import Usage, load_balance_loss
from nnx_pipeline.pipeline import (
    AS_STORED,
    CircularSchedule,
    Inputs,
    Lending,
    OneForwardOneBackward,
    Weights,
    run_one_f_one_b,
    run_pipeline,
)
from nnx_pipeline.remat import EXPERT_USAGE, LAYER_INPUT, POLICIES, named
from nnx_pipeline.sharding import (
    Layout,
    constrain,
    gather_weight,
    out_sharding,
    parameter,
    place,
)


class Mixtral(nnx.Module):
    """A decoder-only transformer of Mixtral or Llama, pipelined when the mesh has stages.

    Made and called under `jax.set_mesh`, its parameters are born in their shardings; without a mesh
    it is an ordinary single-device model. The layers are one stacked module, every parameter
    `[repeats, stages, layers per stage, …]`, where layer = (repeat · stages + stage) · layers per
    stage + j. The initial values depend on `rngs` and not on the mesh.

    Raises InputError when the config does not divide over the mesh.
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        layout: Layout = Layout(),
        parts: Parts = Parts(),
    ) -> None:
        mesh = ambient_mesh()
        config.check_mesh(mesh)
        self.config, self.parts = config, parts
        self.num_stages = mesh.stage
        self.layout = layout = layout.in_copies(self._copies(layout))
        model = config.model
        self.embedding = Embed(model, rngs=rngs, layout=layout)
        self.layers = self._make_layers(rngs)
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
        hidden = self._as_batch(hidden, tokens.shape[0])
        kernel = gather_weight(
            self.head[...].astype(hidden.dtype),
            self.layout.spec("embed", "vocab"),
            self.layout.spec(None, "vocab_of_logits"),
        )
        spec = self.layout.spec("whole_batch", None, "vocab_of_logits")
        logits = jnp.einsum("bsd,dv->bsv", hidden, kernel, out_sharding=out_sharding(spec))
        return logits.astype(jnp.float32)

    def hidden(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> tuple[Array, Array]:
        """The normed output of the last layer, and the router's load-balance loss.

        The output is `[batch, seq, embed]`, or `[microbatches, microbatch, seq, embed]` with the
        first axis over `stage` on a mesh with stages. The loss is averaged over layers and
        microbatches.
        """
        self._check_batch(tokens.shape[0])
        return self._hidden(tokens, {"positions": positions, "segment_ids": segment_ids})

    def _hidden(self, tokens: Array, side: dict[str, Array | None]) -> tuple[Array, Array]:
        spec = self.layout.spec(*self._batch_axes, None, None)
        x = constrain(self.embedding(self._arrange(tokens), out=spec), spec)
        if not self._in_microbatches:
            x, balance = self._one_after_the_other(x, side)
        else:
            x, balance = self._through_pipeline(x, side)
        return self.norm(x), balance

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        positions: Array | None = None,
        segment_ids: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """The loss to minimise, and its two parts: cross-entropy and load balance.

        All arguments are `[batch, seq]`. Cross-entropy is Σ weights · entropy of the targets; the
        router's load-balance loss counts `train.load_balance_weight` times. With
        `pipeline.schedule="1f1b"` the gradient is that of the parameters only, and computed while
        the microbatches pass.
        """
        self._check_batch(tokens.shape[0])
        arrays = (tokens, targets, weights)
        side = {"positions": positions, "segment_ids": segment_ids}
        if self.config.pipeline.schedule == "1f1b":
            return self._loss_by_one_f_one_b(*arrays, side)
        hidden, balance = self._hidden(tokens, side)
        targets, weights = map(self._arrange, (targets, weights))
        entropy = self._entropy(self.head, hidden, targets, weights, self._batch_axes)
        share = self.config.train.load_balance_weight
        return entropy + share * balance if share else entropy, (entropy, balance)

    def _make_layers(self, rngs: nnx.Rngs) -> DecoderLayer:
        config = self.config
        stack = (
            config.pipeline.num_repeats,
            self.num_stages,
            config.layers_per_stage(self.num_stages),
        )
        keys = jax.random.split(rngs.params(), config.model.num_layers).reshape(stack)
        keys = place(keys, self.layout.spec(None, "stage", None))

        def make(key: Array) -> DecoderLayer:
            return DecoderLayer(
                config.model,
                rngs=nnx.Rngs(params=key),
                layout=self.layout,
                parts=self.parts,
                remat=POLICIES[config.pipeline.remat],
            )

        stage = "stage" if self.num_stages > 1 else None
        layers = jax.vmap(jax.vmap(jax.vmap(make), spmd_axis_name=stage))(keys)

        def rename(variable: nnx.Variable) -> nnx.Variable:
            names = (None, "stage", None, *variable.get_metadata("logical_axes"))
            return nnx.Param(variable.get_value(), logical_axes=names)

        return jax.tree.map(rename, layers, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _one_after_the_other(self, x: Array, side: dict[str, Array | None]) -> tuple[Array, Array]:
        layers = jax.tree.map(lambda leaf: leaf[0, 0], self.layers)
        spec = self.layout.spec("batch", None)
        side = jax.tree.map(lambda leaf: place(leaf, spec), side)
        x, usage = self._run_layers(layers, x, side, groups=self.num_microbatches)
        return x, _balance(usage) / self.config.model.num_layers

    def _through_pipeline(self, x: Array, side: dict[str, Array | None]) -> tuple[Array, Array]:
        pipeline = self.config.pipeline
        schedule = CircularSchedule(
            stages=self.num_stages,
            microbatches=self.num_microbatches,
            repeats=pipeline.num_repeats,
            delay=pipeline.forwarding_delay,
        )
        x, balance = run_pipeline(
            self._apply_stage,
            self.layers,
            x,
            jax.tree.map(self._on_every_stage, side),
            schedule=schedule,
            shift_by=pipeline.shift,
            remat=POLICIES[pipeline.remat],
            saved_in_stage=self._saved_in_stage,
            backward="accumulate" if pipeline.accumulates else "autodiff",
            lending=self._lending(),
            over=self.parts.over_stages,
        )
        return x, balance / (self.config.model.num_layers * self.num_microbatches)

    def _loss_by_one_f_one_b(
        self, tokens: Array, targets: Array, weights: Array, side: dict[str, Array | None]
    ) -> tuple[Array, tuple[Array, Array]]:
        pipeline, visits = (
            self.config.pipeline,
            self.config.model.num_layers * self.num_microbatches,
        )
        batch_axes = self._batch_axes[1:]
        spec = self.layout.spec(*batch_axes, None, None)

        def enter(embedding: Embed, tokens: Array) -> Array:
            return constrain(embedding(tokens, out=spec), spec)

        def leave(last: tuple[RMSNorm, nnx.Param], x: Array, inputs: tuple[Array, Array]) -> Array:
            norm, head = last
            return self._entropy(head, norm(x), *inputs, batch_axes)

        arrays = (tokens, side, (targets, weights))
        loss, (entropy, balance) = run_one_f_one_b(
            enter,
            self._apply_stage,
            leave,
            Weights(enter=self.embedding, stages=self.layers, leave=(self.norm, self.head)),
            Inputs(*jax.tree.map(self._on_every_stage, arrays)),
            schedule=OneForwardOneBackward(self.num_stages, self.num_microbatches),
            metric_weights=self.config.train.load_balance_weight / visits,
            shift_by=pipeline.shift,
            remat=POLICIES[pipeline.remat],
            saved_in_stage=self._saved_in_stage,
            lending=self._lending(),
            over=self.parts.over_stages,
        )
        return loss, (entropy, balance / visits)

    def _entropy(
        self,
        head: nnx.Param,
        hidden: Array,
        targets: Array,
        weights: Array,
        batch_axes: tuple[str, ...],
    ) -> Array:
        return self.parts.loss(
            hidden,
            head[...],
            targets,
            weights,
            batch_axes=batch_axes,
            chunks=self.config.train.loss_chunks,
            layout=self.layout,
        )

    def _apply_stage(
        self, layers: DecoderLayer, x: Array, side: dict[str, Array | None]
    ) -> tuple[Array, Array]:
        """The layers of one stage on one microbatch, in copies where the weights are."""
        layers = with_layout(layers, self.layout.gathered(self._gathered_axes))
        if not self.layout.axes("copy"):
            x, usage = self._run_layers(layers, x, side)
            return x, _balance(usage)
        in_copies = jax.vmap(self._run_layers, spmd_axis_name=self.layout.axes("copy"))
        x, usage = in_copies(layers, x, side)
        return x, _balance(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), usage))

    def _run_layers(
        self,
        layers: DecoderLayer,
        x: Array,
        side: dict[str, Array | None],
        groups: int = 1,
    ) -> tuple[Array, Usage | None]:
        """The layers of one stage in turn; their stacked parameters are scanned over."""

        def apply(x: Array, layer: DecoderLayer) -> tuple[Array, Usage | None]:
            return layer(x, groups=groups, **side)

        apply = POLICIES[self.config.pipeline.remat].checkpoint(apply, in_scan=True)

        def body(x: Array, layer: DecoderLayer) -> tuple[Array, Usage | None]:
            x, usage = apply(named(x, LAYER_INPUT), layer)
            return x, jax.tree.map(lambda leaf: named(leaf, EXPERT_USAGE), usage)

        return jax.lax.scan(body, x, layers)

    def _copies(self, layout: Layout) -> tuple[str, ...]:
        """Mesh axes along which layers run in copies, so that gradients add up where they arise."""
        pipeline = self.config.pipeline
        if not (pipeline.accumulates and self._in_microbatches):
            return ()
        own = ("data", *self._gathered_axes)
        return tuple(axis for axis in layout.axes("batch") if axis in own)

    @property
    def _gathered_axes(self) -> tuple[str, ...]:
        """Mesh axes over which weights are gathered before the ticks that use them."""
        return () if self.config.pipeline.fsdp_gather == "use" else ("fsdp",)

    def _lending(self) -> Lending:
        if not self.layout.axes("copy"):
            return AS_STORED
        variables = jax.tree.leaves(self.layers, is_leaf=lambda x: isinstance(x, nnx.Variable))
        return Lending(
            specs=tuple(self.layout.spec(*v.get_metadata("logical_axes")) for v in variables),
            copies=self.layout.axes("copy"),
            gathered=self._gathered_axes,
            dtype=self.config.model.dtype if self._gathered_axes else None,
        )

    @property
    def _saved_in_stage(self) -> tuple[str, ...]:
        """One layer's input is the stage's input, which is kept anyway."""
        several = self.config.layers_per_stage(self.num_stages) > 1
        inputs = several and self.config.pipeline.save_decoder_layer_input
        return (EXPERT_USAGE, LAYER_INPUT) if inputs else (EXPERT_USAGE,)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on this mesh."""
        return self.config.pipeline.microbatches_on(self.num_stages)

    @property
    def _in_microbatches(self) -> bool:
        """Whether the batch goes through the layers microbatch by microbatch."""
        return self.num_stages > 1 or self.config.pipeline.schedule == "1f1b"

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """Logical axes of hidden states before their sequence."""
        copy = ("copy",) if self.layout.axes("copy") else ()
        return ("microbatch", *copy, "batch") if self._in_microbatches else ("whole_batch",)

    def _arrange(self, x: Array) -> Array:
        """Puts a `[batch, seq]` array of tokens, targets or weights beside the hidden states."""
        x = self._cut(x) if self._in_microbatches else x
        return place(x, self.layout.spec(*self._batch_axes, None))

    def _cut(self, x: Array) -> Array:
        """[batch, seq] to [microbatches, microbatch, seq], whole everywhere: these are small.

        With copies, to [microbatches, copies, sequences of a copy, seq].
        """
        x = place(x, self.layout.spec(None, None))
        copies = (self.layout.size("copy"),) if self.layout.axes("copy") else ()
        return x.reshape(self.num_microbatches, *copies, -1, x.shape[-1])

    def _on_every_stage(self, x: Array) -> Array:
        """[batch, seq] to [microbatches, microbatch, seq], whole on every stage."""
        return place(self._cut(x), self.layout.spec(None, *self._batch_axes[1:], None))

    def _as_batch(self, x: Array, batch: int) -> Array:
        """Hidden states in the layout of `arrange` back to `[batch, seq, embed]`."""
        if self._in_microbatches:
            x = place(x, self.layout.spec("microbatch", *[None] * (x.ndim - 1)))
            x = x.reshape(batch, *x.shape[-2:])
        return place(x, self.layout.spec("whole_batch", None, None))

    def _check_batch(self, batch: int) -> None:
        train = dataclasses.replace(self.config.train, global_batch=batch)
        config = dataclasses.replace(self.config, train=train)
        mesh = ambient_mesh()
        config.check_mesh(mesh)
        if mesh.stage != self.num_stages:
            raise InputError(
                f"the model was made for {self.num_stages} stages and the mesh has "
                f"stage={mesh.stage}; make and call it under the same mesh"
            )


def _balance(usage: Usage | None) -> Array:
    """The load-balance loss of several layers, summed; 0 for layers without a router."""
    return jnp.zeros((), jnp.float32) if usage is None else jnp.sum(load_balance_loss(usage))
