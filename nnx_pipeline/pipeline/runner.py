"""How stacked layers run: through the pipeline, or one after the other, whoever owns them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.errors import InputError, divides
from nnx_pipeline.mesh import ambient_mesh
from nnx_pipeline.pipeline.batches import Batches
from nnx_pipeline.pipeline.layers import call_layer, with_keys
from nnx_pipeline.pipeline.lend import Lending
from nnx_pipeline.pipeline.loop import run_pipeline
from nnx_pipeline.pipeline.loop_parts import DEFAULT_PARTS, LoopParts
from nnx_pipeline.pipeline.metrics import given_out, over_layers
from nnx_pipeline.pipeline.one_f_one_b import run_one_f_one_b
from nnx_pipeline.pipeline.one_f_one_b_state import Enter, Inputs, Leave, Weights
from nnx_pipeline.pipeline.owners import Owners, make_owners
from nnx_pipeline.pipeline.schedule import make_schedule
from nnx_pipeline.pipeline.stages import OverStages, over_stages
from nnx_pipeline.pipeline_config import PipelineConfig
from nnx_pipeline.remat import LAYER_INPUT, LAYER_METRICS, POLICIES, named
from nnx_pipeline.sharding import Layout, P, mesh_sizes, place, with_layout

ApplyLayer = Callable[[Array, Any], tuple[Array, PyTree]]


@dataclass(frozen=True)
class Runner:
    """Everything about a pipeline but its layers; see `make_runner` and `CircularPipeline`.

    The layers that its methods take are one callable pytree of variables `[repeats, stages, layers
    per stage, …]` with `logical_axes`, as `make_layers` gives it.

    layout: that of the activations, with an axis of copies where the layers run in copies. own: the
    axes of `CircularPipeline.own` that the mesh has.
    """

    config: PipelineConfig
    num_layers: int
    num_stages: int
    layout: Layout
    dtype: str | None
    grad_dtype: str | None
    own: tuple[str, ...]
    over: OverStages
    loop_parts: LoopParts

    @property
    def stack(self) -> tuple[int, int, int]:
        """(repeats, stages, layers per stage)."""
        visits = self.num_stages * self.config.num_repeats
        return self.config.num_repeats, self.num_stages, self.num_layers // visits

    @property
    def layers_per_stage(self) -> int:
        """How many consecutive layers a stage applies each time a microbatch visits it."""
        return self.stack[2]

    def run(
        self,
        layers: Any,
        x: Array,
        side: dict[str, Array | None],
        *,
        keys: Array | None = None,
        owned: Any = None,
    ) -> tuple[Array, PyTree]:
        """The layers on x, laid out by `batches.arrange`, and so is the result; and the metrics.

        side: what a layer reads beside x, by the names of its arguments. keys: for dropout, as
        `ops.dropout.sequence_keys` makes them. owned: the layers laid out by `Layout.owned`, which
        get the gradient with `own`.
        """
        side = with_keys(side, keys)
        if not self.in_microbatches:
            side = jax.tree.map(self.batches.arrange, side)
            return self._run_whole_batch(layers, x, side, owned)
        config = self.config
        return run_pipeline(
            self._apply_stage,
            self._stack(layers, owned),
            x,
            jax.tree.map(self.batches.on_every_stage, side),
            schedule=self.schedule("circular"),
            backward="accumulate" if config.accumulates else "autodiff",
            parts=self.loop_parts,
            **self._options(layers),
        )

    def loss(
        self,
        layers: Any,
        enter: Enter,
        leave: Leave,
        weights: tuple[PyTree, PyTree],
        inputs: tuple[PyTree, PyTree],
        side: dict[str, Array | None],
        *,
        keys: Array | None = None,
        metric_weights: PyTree = None,
        owned: Any = None,
    ) -> tuple[Array, tuple[Array, PyTree]]:
        """The loss of the whole model by 1F1B, and its two parts; see `run_one_f_one_b`.

        weights: of `enter` and of `leave`. inputs: what they read, `[batch, …]`. Both work on one
        microbatch, activations laid out by `batches.axes` without the first. keys, owned: as in
        `run`.
        """
        arrays = (inputs[0], with_keys(side, keys), inputs[1])
        return run_one_f_one_b(
            enter,
            self._apply_stage,
            leave,
            Weights(enter=weights[0], stages=self._stack(layers, owned), leave=weights[1]),
            Inputs(*jax.tree.map(self.batches.on_every_stage, arrays)),
            schedule=self.schedule("1f1b"),
            metric_weights=metric_weights,
            **self._options(layers),
        )

    @property
    def batches(self) -> Batches:
        """How a batch is cut up and laid out on this mesh.

        Raises InputError on a mesh of other stages, and when microbatches do not fit them.
        """
        on_mesh = ambient_mesh().stage
        if on_mesh != self.num_stages:
            raise InputError(
                f"the pipeline was made for {self.num_stages} stages and the mesh has "
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
        """Whether the batch goes through the layers microbatch by microbatch."""
        return _in_microbatches(self.config, self.num_stages)

    def schedule(self, name: str) -> Any:
        """The timetable of that name; InputError when its numbers do not fit together."""
        repeats, stages, _ = self.stack
        return make_schedule(
            name,
            stages=stages,
            microbatches=self.config.microbatches_on(stages),
            repeats=repeats,
            delay=self.config.forwarding_delay,
        )

    def _stack(self, layers: Any, owned: Any) -> tuple[Any, Array]:
        """What the stages get: the layers, and the number of each.

        Both are in copies if each device owns its part of the gradients.
        """
        numbers = self._numbers
        if self.own:
            layers = self._owners(layers, skip=0, axis=2).lend(layers, owned)
            copies = math.prod(mesh_sizes()[axis] for axis in self.own)
            numbers = jnp.repeat(numbers[:, :, None], copies, axis=2)
        return layers, place(numbers, self._numbers_spec)

    @property
    def _numbers(self) -> Array:
        return jnp.arange(self.num_layers, dtype=jnp.int32).reshape(self.stack)

    @property
    def _numbers_spec(self) -> P:
        copies = (self.own,) if self.own else ()
        return P(*self.layout.spec(None, "stage"), *copies, None)

    def _apply_stage(
        self, stack: tuple[Any, Array], x: Array, side: dict[str, Array | None]
    ) -> tuple[Array, PyTree]:
        """The layers of one stage on one microbatch, in copies where the weights are."""
        layout = self.layout.gathered(self._gathered_axes)
        stack = with_layout(stack[0], layout), stack[1]

        def run(stack: Any, x: Array, side: dict[str, Array | None]) -> tuple[Array, PyTree]:
            return self._run_layers(lambda x, layer: call_layer(layer, x, side), stack, x)

        copies = self.layout.axes("copy")
        if not copies:
            x, metrics = run(stack, x, side)
            return x, over_layers(metrics)
        x, metrics = jax.vmap(run, spmd_axis_name=copies)(stack, x, side)
        return x, over_layers(metrics, copies=0)

    def _run_whole_batch(
        self,
        layers: Any,
        x: Array,
        side: dict[str, Array | None],
        owned: Any,
    ) -> tuple[Array, PyTree]:
        """All layers on the whole batch, in copies if each device owns its part of gradients.

        Copies are made layer by layer, so that the gradient of one layer at a time exists whole.
        """
        copies = self.layout.axes("copy")
        owners = self._owners(layers, skip=3, axis=0) if copies else None
        call = functools.partial(call_layer, microbatches=self.batches.microbatches)

        def apply(x: Array, stacked: Any) -> tuple[Array, PyTree]:
            layer, owned, number = stacked
            if owners is None:
                return call((layer, number), x, side)

            def one(layer: Any, x: Array, side: dict[str, Array | None]) -> tuple[Array, PyTree]:
                return call((layer, number), x, side)

            return jax.vmap(one, spmd_axis_name=copies)(owners.lend(layer, owned), x, side)

        stack = (with_layout(layers, self.layout), owned, self._numbers)
        stack = jax.tree.map(_in_order, stack)
        x, metrics = self._run_layers(apply, stack, x)
        return x, given_out(over_layers(metrics, copies=1 if copies else None), x)

    def _run_layers(self, apply: ApplyLayer, stack: Any, x: Array) -> tuple[Array, PyTree]:
        """The layers of one stage in turn: a scan where there are several.

        Where some of what they compute is offloaded they run one after the other, because no
        compiler brings a value out of a loop inside another loop to the host.
        """
        remat = POLICIES[self.config.remat]
        alone = self.in_microbatches and self.layers_per_stage == 1
        unrolled = alone or (self.in_microbatches and bool(remat.offloaded))
        if not alone:  # else the checkpoint of a tick is that of its layer
            apply = remat.checkpoint(apply, in_scan=not unrolled)

        def body(x: Array, layer: Any) -> tuple[Array, PyTree]:
            x, metrics = apply(named(x, LAYER_INPUT), layer)
            return x, jax.tree.map(lambda leaf: named(leaf, LAYER_METRICS), metrics)

        if not unrolled:
            return jax.lax.scan(body, x, stack)
        found = []
        for index in range(self.layers_per_stage):
            x, metrics = body(x, jax.tree.map(lambda leaf, at=index: leaf[at], stack))
            found.append(metrics)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def _options(self, layers: Any) -> dict[str, Any]:
        """What both loops are told."""
        # One layer's input is the stage's input, which is kept anyway.
        inputs = self.layers_per_stage > 1 and self.config.save_decoder_layer_input
        return {
            "shift_by": self.config.shift,
            "remat": POLICIES[self.config.remat],
            "saved_in_stage": (LAYER_METRICS, LAYER_INPUT) if inputs else (LAYER_METRICS,),
            "grad_dtype": self.grad_dtype if self.config.accumulates else None,
            "lending": self._lending(layers),
            "over": self.over,
        }

    @property
    def _gathered_axes(self) -> tuple[str, ...]:
        return gathered_axes(self.config)

    def _lending(self, layers: Any) -> Lending:
        copies = self.layout.axes("copy")
        ahead = self.config.fsdp_gather == "prefetch"
        if not (copies and self.config.accumulates):
            return Lending(ahead=ahead)
        owners = self._owners(layers, skip=0, axis=2)
        return Lending(
            specs=(*(owners.lent if self.own else owners.stored), self._numbers_spec),
            lent=self.own,
            copies=copies,
            gathered=self._gathered_axes,
            dtype=self.dtype if self._gathered_axes else None,
            ahead=ahead,
        )

    def _owners(self, layers: Any, *, skip: int, axis: int) -> Owners:
        return make_owners(
            layers, self.layout, self.own, skip=skip, axis=axis, dtype=self.grad_dtype
        )


def make_runner(
    config: PipelineConfig,
    *,
    num_layers: int,
    layout: Layout = Layout(),
    dtype: str | None = None,
    grad_dtype: str | None = None,
    own: tuple[str, ...] = (),
    over: OverStages = over_stages,
    loop_parts: LoopParts = DEFAULT_PARTS,
) -> Runner:
    """The runner for the ambient mesh; the arguments are those of `CircularPipeline`.

    Raises InputError when layers do not divide. Microbatches are a matter of the batch: weights are
    held on meshes that the numbers of the schedule do not fit.
    """
    mesh = ambient_mesh()
    divides(
        mesh.stage * config.num_repeats,
        num_layers,
        rule=f"{num_layers} layers do not split into {mesh.stage} stages × "
        f"{config.num_repeats} repeats",
    )
    own = tuple(axis for axis in layout.axes("batch") if axis in own)
    copies = {*own}
    if config.accumulates and _in_microbatches(config, mesh.stage):
        copies |= {"data", *gathered_axes(config)}
    return Runner(
        config,
        num_layers,
        mesh.stage,
        layout.in_copies(tuple(axis for axis in layout.axes("batch") if axis in copies)),
        dtype,
        grad_dtype,
        own,
        over,
        loop_parts,
    )


def _in_order(leaf: Array) -> Array:
    """`[repeats, 1, layers per stage, …]` as `[layers, …]`: one stage has all of them."""
    return leaf[0, 0] if leaf.shape[0] == 1 else leaf.reshape(-1, *leaf.shape[3:])


def gathered_axes(config: PipelineConfig) -> tuple[str, ...]:
    """Mesh axes over which weights are gathered before the ticks that use them."""
    return () if config.fsdp_gather == "use" else ("fsdp",)


def _in_microbatches(config: PipelineConfig, stages: int) -> bool:
    return stages > 1 or config.schedule == "1f1b"
