"""What is measured: the same layers in six styles, and the three loops that they run in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from linen_compat.bridge import to_linen, to_nnx
from linen_compat.modules import LlamaDecoderLayer, MixtralDecoderLayer
from nnx_pipeline import Config, DecoderLayer, MeshConfig, ModelConfig, make_mesh, run_pipeline
from nnx_pipeline.pipeline import CircularSchedule
from nnx_pipeline.sharding.layout import place

NATIVE_NNX, NATIVE_LINEN = "native NNX", "native Linen"


@dataclass(frozen=True)
class Style:
    """One style in which the layers are written.

    `native` is the name of the arm whose layer this one wraps, or its own. `make` makes a layer
    from a config and `rngs` (NNX) or a name (Linen).
    """

    name: str
    native: str
    is_linen: bool
    make: Callable[..., Any]


@dataclass(frozen=True)
class LayersProgram:
    """What is measured for one arm in one loop.

    `loss` takes (parameters, x), and `place` adds shardings to a tree of abstract arrays.
    """

    init: Callable[[], PyTree]
    loss: Callable[[PyTree, Array], Array]
    x: jax.ShapeDtypeStruct
    place: Callable[[PyTree], PyTree] = lambda tree: tree


def linen_layer(model: ModelConfig, name: str | None = None) -> nn.Module:
    """The native Linen layer of a model: Mixtral's, or with one expert Llama's."""
    return (MixtralDecoderLayer if model.num_experts > 1 else LlamaDecoderLayer)(model, name=name)


def _flax_to_nnx(config: Config, rngs: nnx.Rngs) -> nnx.Module:
    """A layer in Flax's wrapper, without its stream of keys, which in a loop would change."""
    with nnx.use_eager_sharding(False):  # which would take logical axes for mesh axes
        x = jnp.zeros(example(config).shape, example(config).dtype)
        wrapped: nnx.Module = nnx.bridge.ToNNX(linen_layer(config.model), rngs=rngs).lazy_init(x)
    vars(wrapped)["to_nnx__rngs"] = None
    return wrapped


def _linen_by(wrap: Callable[..., Any]) -> Callable[..., Any]:
    return lambda config, name: wrap(DecoderLayer, config.model, name=name)


def _to_nnx(config: Config, rngs: nnx.Rngs) -> nnx.Module:
    return to_nnx(linen_layer(config.model), example(config), rngs=rngs)


ARMS = (
    Style(NATIVE_NNX, NATIVE_NNX, False, lambda c, rngs: DecoderLayer(c.model, rngs=rngs)),
    Style(NATIVE_LINEN, NATIVE_LINEN, True, lambda c, name: linen_layer(c.model, name=name)),
    Style("NNX as Linen", NATIVE_NNX, True, _linen_by(to_linen)),
    Style("Linen as NNX", NATIVE_LINEN, False, _to_nnx),
    Style("Flax ToLinen", NATIVE_NNX, True, _linen_by(nnx.bridge.to_linen)),
    Style("Flax ToNNX", NATIVE_LINEN, False, _flax_to_nnx),
)


def example(config: Config, batch: int = 1) -> jax.ShapeDtypeStruct:
    """Abstract activations `[batch, seq, embed]` in the model's dtype."""
    shape = (batch, config.train.sequence_length, config.model.embed_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(config.model.dtype))


def stages_for(layers: int) -> int:
    """The stages of the measured pipeline: 4 or 2, whichever divides the layers first, else 0."""
    return next((stages for stages in (4, 2) if layers % stages == 0), 0)


def mesh_for_loop(loop: str, layers: int) -> Mesh | None:
    """The mesh that a loop runs on: one with stages for the pipeline, None for the other loops."""
    if loop != "pipeline":
        return None
    return make_mesh(MeshConfig(stage=stages_for(layers)), jax.devices("cpu"))


def make_program(arm: Style, loop: str, config: Config, mesh: Mesh | None) -> LayersProgram:
    """The program that runs the layers of an arm in one of `LOOPS`."""
    if loop == "pipeline":
        assert mesh is not None, "a pipeline runs on a mesh with stages"
        return _pipeline(arm, config, mesh)
    if arm.is_linen:
        return _linen((_Unrolled if loop == "unrolled" else _Scanned)(arm, config), config)
    return (_nnx_unrolled if loop == "unrolled" else _nnx_scanned)(arm, config)


def _mean_square(x: Array) -> Array:
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _nnx_unrolled(arm: Style, config: Config) -> LayersProgram:
    def init() -> list[PyTree]:
        rngs = nnx.Rngs(params=0)
        return [arm.make(config, rngs) for _ in range(config.model.num_layers)]

    def loss(layers: list[PyTree], x: Array) -> Array:
        for layer in layers:
            x, _ = layer(x)
        return _mean_square(x)

    return LayersProgram(init, loss, example(config, config.train.global_batch))


def _nnx_scanned(arm: Style, config: Config) -> LayersProgram:
    def init() -> PyTree:
        keys = jax.random.split(jax.random.key(0), config.model.num_layers)
        return jax.vmap(lambda key: arm.make(config, nnx.Rngs(params=key)))(keys)

    def loss(stack: PyTree, x: Array) -> Array:
        return _mean_square(jax.lax.scan(lambda x, layer: layer(x), x, stack)[0])

    return LayersProgram(init, loss, example(config, config.train.global_batch))


class _Unrolled(nn.Module):
    """Layers one after the other, under MaxText's names."""

    arm: Style
    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for index in range(self.config.model.num_layers):
            x, _ = self.arm.make(self.config, f"layers_{index}")(x)
        return x


class _Scanned(nn.Module):
    """Layers stacked by `nn.scan`."""

    arm: Style
    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scan = cast(Callable[..., Callable[..., tuple[Array, None]]], nn.scan)
        scanned = scan(
            lambda layer, x, _: layer(x),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.model.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
            # They would trace the body twice, to find what is the same in all layers: nothing is.
            check_constancy_invariants=False,
        )
        return scanned(self.arm.make(self.config, "layers"), x, None)[0]


def _linen(module: nn.Module, config: Config) -> LayersProgram:
    init, apply = _linen_init(module, config), cast(Callable[..., Array], module.apply)

    def loss(variables: PyTree, x: Array) -> Array:
        return _mean_square(apply(variables, x))

    x = example(config, config.train.global_batch)
    return LayersProgram(lambda: init(jax.random.key(0)), loss, x)


def _linen_init(module: nn.Module, config: Config) -> Callable[[Array], PyTree]:
    x = example(config)
    return lambda key: nn.meta.unbox(module.init(key, jnp.zeros(x.shape, x.dtype)))


def _pipeline(arm: Style, config: Config, mesh: Mesh) -> LayersProgram:
    """One layer per stage and repeat, in as many microbatches as stages."""
    layer = arm.make(config, None) if arm.is_linen else None
    apply = layer.apply if layer else lambda layer, x: layer(x)

    def init_nnx(key: Array) -> PyTree:
        return arm.make(config, nnx.Rngs(params=key))

    init_layer = _linen_init(layer, config) if layer else init_nnx
    stages = mesh.shape["stage"]
    repeats = config.model.num_layers // stages
    schedule = CircularSchedule(stages=stages, microbatches=stages, repeats=repeats)

    def init() -> PyTree:
        keys = jax.random.split(jax.random.key(0), repeats * stages).reshape(repeats, stages)
        keys = place(keys, P(None, "stage"))
        return jax.vmap(jax.vmap(init_layer, spmd_axis_name="stage"))(keys)

    def stage(stack: PyTree, x: Array, side: None) -> tuple[Array, dict[str, Array]]:
        return apply(stack, x)[0], {}

    def loss(stack: PyTree, x: Array) -> Array:
        return _mean_square(run_pipeline(stage, stack, x, schedule=schedule)[0])

    def put(tree: PyTree) -> PyTree:
        sharding = NamedSharding(mesh, P(None, "stage"))
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    whole = example(config, config.train.global_batch)
    x = jax.ShapeDtypeStruct(
        (stages, whole.shape[0] // stages, *whole.shape[1:]),
        whole.dtype,
        sharding=NamedSharding(mesh, P("stage")),
    )
    return LayersProgram(init, loss, x, put)
