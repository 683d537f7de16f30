"""Linen modules as NNX modules: names, values, state, random numbers, and no init in a call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from linen_compat import modules
from linen_compat.bridge import to_linen, to_nnx
from nnx_pipeline import (
    MLP,
    Attention,
    DecoderLayer,
    Embed,
    InputError,
    Max,
    PipelineConfig,
    RMSNorm,
    RoutedMoE,
)
from nnx_pipeline.pipeline import CircularPipeline, CircularSchedule, run_pipeline
from nnx_pipeline.sharding.layout import Layout, with_layout
from tests.helpers import arrays_by_path, assert_close, float_rows, mesh_of, small_config

pytestmark = pytest.mark.jax_alone

MADE: list[str] = []


def drawn(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    MADE.append("kernel")
    return nn.initializers.lecun_normal()(key, shape)


class Layer(nn.Module):
    """A residual layer with boxed and plain parameters, one of them in a module of its own."""

    layout: object = None

    @nn.compact
    def __call__(self, x: jax.Array, **side: object) -> tuple[jax.Array, dict]:
        init = nn.with_logical_partitioning(drawn, ("embed", "mlp_moe"))
        kernel = self.param("kernel", init, (x.shape[-1], x.shape[-1]))
        hidden = nn.Dense(x.shape[-1], name="dense")(jnp.tanh(x @ kernel))
        return x + hidden, {"largest": Max(jnp.max(hidden))}


def x_of(batch: int = 2) -> jax.Array:
    return float_rows(batch, 3, 16)


def test_the_names_of_nnx_are_those_of_the_wrapped_module_alone() -> None:
    """Below another module, and in the whole model, paths stay Linen's."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return modules.MixtralDecoderLayer(config, name="layer")(x)[0]

    def paths(module: nn.Module, x: jax.Array) -> set[str]:
        wrapped = nnx.eval_shape(lambda: to_nnx(module, x, rngs=nnx.Rngs(0)))
        return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(wrapped))}

    config = small_config().model
    x = float_rows(2, 3, config.embed_dim)
    assert "attention.query" in paths(modules.MixtralDecoderLayer(config), x)
    assert "layer.self_attention.query.kernel" in paths(Outer(), x)
    whole = paths(modules.Transformer(small_config()), jnp.zeros((2, 3), jnp.int32))
    assert "decoder.layers.self_attention.query.kernel" in whole
    assert "token_embedder.embedding" in whole


def test_variables_have_linens_paths_types_and_axes() -> None:
    model = to_nnx(Layer(), x_of(), rngs=0)
    assert sorted(arrays_by_path(nnx.state(model))) == [
        "dense/bias/value",
        "dense/kernel/value",
        "kernel/value",
    ]
    assert isinstance(model.dense.kernel, nnx.Param)
    assert model.kernel.get_metadata("logical_axes") == ("embed", "mlp")
    assert "logical_axes" not in model.dense.kernel.get_metadata()


def test_other_boxes_are_kept_and_go_back_to_linen() -> None:
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self) -> jax.Array:
            init = nn.with_partitioning(nn.initializers.ones, ("stage", None))
            return self.param("kernel", init, (2, 2))

    model = to_nnx(Boxed(), rngs=0)
    assert model.kernel.get_metadata("linen_box").names == ("stage", None)
    np.testing.assert_array_equal(model(), jnp.ones((2, 2)))


@pytest.mark.parametrize("example", [x_of(), jax.ShapeDtypeStruct((2, 3, 16), jnp.float32)])
def test_values_and_gradients_are_linens_and_nothing_is_made_in_a_call(example: object) -> None:
    variables = nn.meta.unbox(Layer().init(jax.random.key(0), x_of()))
    model = to_nnx(Layer(), example, rngs=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, model(x_of()), Layer().apply(variables, x_of()))
    ours = jax.grad(lambda model: jnp.sum(model(x_of())[0]))(model)
    theirs = jax.grad(lambda v: jnp.sum(Layer().apply(v, x_of())[0]))(variables)["params"]
    np.testing.assert_array_equal(ours.dense.kernel[...], theirs["dense"]["kernel"])
    np.testing.assert_array_equal(ours.kernel[...], theirs["kernel"])


def test_the_program_is_that_of_the_linen_module() -> None:
    variables = nn.meta.unbox(Layer().init(jax.random.key(0), x_of()))
    model = to_nnx(Layer(), x_of(), rngs=0)
    ours = jax.make_jaxpr(lambda m: jax.value_and_grad(lambda m: jnp.sum(m(x_of())[0]))(m)[0])
    theirs = jax.make_jaxpr(
        lambda v: jax.value_and_grad(lambda v: jnp.sum(Layer().apply(v, x_of())[0]))(v)[0]
    )
    # Both trees have the same order: dense/bias, dense/kernel, kernel.
    assert str(ours(model)) == str(theirs(variables))


def test_a_call_asks_linen_for_no_more_than_a_native_apply_does() -> None:
    """Linen looks at the shapes of initial values in each apply, without making them."""
    variables = nn.meta.unbox(Layer().init(jax.random.key(0), x_of()))
    model = to_nnx(Layer(), x_of(), rngs=0)

    def made_by(call) -> int:
        MADE.clear()
        jax.make_jaxpr(call)(x_of())
        return len(MADE)

    assert made_by(lambda x: model(x)) == made_by(lambda x: Layer().apply(variables, x))


def test_given_variables_are_taken_and_must_be_the_modules() -> None:
    variables = Layer().init(jax.random.key(5), x_of())
    for given in (variables, nn.meta.unbox(variables)):
        model = to_nnx(Layer(), x_of(), variables=given)
        np.testing.assert_array_equal(model.kernel[...], variables["params"]["kernel"].value)
        assert model.kernel.get_metadata("logical_axes") == ("embed", "mlp")
    plain = nn.meta.unbox(variables)["params"]

    def refuse(message: str, **params: object) -> None:
        with pytest.raises(InputError, match=message):
            to_nnx(Layer(), x_of(), variables={"params": params})

    dense, kernel = plain["dense"], plain["kernel"]
    refuse(
        r"params/dence/kernel is not a variable of Layer \(and 1 more\); .* is params/dense/kernel",
        **{"dence": dense, "kernel": kernel},
    )
    refuse(r"params/kernel, a variable of Layer, is not in the tree", dense=dense)
    refuse(
        r"params/kernel has shape \(4,\) and Layer needs \(16, 16\)",
        dense=dense,
        kernel=kernel[0, :4],
    )


def test_what_cannot_be_wrapped_is_refused() -> None:
    class Twins(nn.Module):
        @nn.compact
        def __call__(self) -> None:
            self.param("twin", nn.initializers.ones, ())
            self.variable("cache", "twin", lambda: jnp.ones(()))

    class Late(nn.Module):
        @nn.compact
        def __call__(self, late: bool = False) -> None:
            self.variable("cache", "early", lambda: jnp.ones(()))
            if late:
                self.variable("cache", "late", lambda: jnp.ones(()))

    class Named(nn.Module):
        child: str

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(16, name=self.child)(x)

    with pytest.raises(InputError, match=r"layout\.\w+ would hide layout of the wrapper; rename"):
        to_nnx(Named("layout"), x_of(), rngs=0)
    for child in ("train", "items"):  # methods of NNX, which a name may hide
        model = to_nnx(Named(child), x_of(), rngs=0)
        assert model(x_of()).shape == x_of().shape
    with pytest.raises(InputError, match=r"two variables would be called twin"):
        to_nnx(Twins(), rngs=0)
    with pytest.raises(InputError, match=r"Late made cache/late in a call, but not in init"):
        to_nnx(Late(), rngs=0)(late=True)
    with pytest.raises(InputError, match=r"got no rngs; give rngs=nnx\.Rngs\(0\)"):
        to_nnx(Layer(), x_of())


def test_nnx_tools_work_on_it() -> None:
    model = to_nnx(Layer(), x_of(), rngs=0)
    again = nnx.merge(*nnx.split(model))
    jax.tree.map(np.testing.assert_array_equal, again(x_of()), model(x_of()))
    assert jax.tree.structure(model) == jax.tree.structure(to_nnx(Layer(), x_of(), rngs=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = model.kernel[...]
    gradients = nnx.grad(lambda model: jnp.sum(model(x_of())[0]))(model)
    optimizer.update(model, gradients)
    assert_close(model.kernel[...], before - 0.1 * gradients.kernel[...], 1e-6)


def stacked(count: int) -> nnx.Module:
    keys = jax.random.split(jax.random.key(0), count)
    return jax.vmap(lambda key: to_nnx(Layer(), x_of(), rngs=key))(keys)


def test_layers_run_under_a_scan() -> None:
    layers = stacked(3)
    scanned, _ = jax.lax.scan(lambda x, layer: layer(x), x_of(), layers)
    x = x_of()
    for index in range(3):
        x, _ = jax.tree.map(lambda leaf, at=index: leaf[at], layers)(x)
    np.testing.assert_allclose(scanned, x, rtol=1e-6, atol=1e-6)


def make_layer(rngs: nnx.Rngs) -> nnx.Module:
    return to_nnx(Layer(), jax.ShapeDtypeStruct((2, 3, 16), jnp.float32), rngs=rngs)


@pytest.mark.parametrize("mesh", ["stage=2", "stage=2,fsdp=2"])
def test_layers_run_in_the_pipeline(mesh: str) -> None:
    """Values and gradients against the same layers one after the other, without a mesh."""

    def made() -> CircularPipeline:
        config = PipelineConfig(num_microbatches=4)
        return CircularPipeline(config, make_layer, num_layers=4, rngs=nnx.Rngs(0))

    def loss(model: CircularPipeline, x: jax.Array) -> jax.Array:
        y, metrics = model(x)
        return jnp.sum(y**2), metrics

    plain = made()
    (wanted, _), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(plain, x_of(8))
    with jax.set_mesh(mesh_of(mesh)):
        model = jax.jit(made)()
        assert model.layers.kernel.get_metadata("logical_axes")[1:] == (
            "stage",
            None,
            "embed",
            "mlp",
        )
        assert model.layers.kernel.sharding.spec[1] == "stage"
        value, gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(model, x_of(8))
    np.testing.assert_allclose(value[0], wanted, rtol=1e-5)
    for path, leaf in arrays_by_path(gradients).items():
        reference = np.asarray(arrays_by_path(slopes)[path]).reshape(leaf.shape)
        np.testing.assert_allclose(leaf, reference, rtol=1e-4, atol=1e-5)


def test_a_wrapped_nnx_layer_runs_in_the_pipeline_too() -> None:
    """There and back: `to_linen` within `run_pipeline`, its parameters a plain tree."""
    norm = to_linen(RMSNorm, small_config().model)
    params = nn.meta.unbox(norm.init(jax.random.key(0), x_of()))
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf])[None], params)

    def stage(params: dict, x: jax.Array, side: None) -> tuple[jax.Array, dict]:
        return norm.apply(params, x), {}

    with jax.set_mesh(mesh_of("stage=2")):
        placed = jax.device_put((stack, x_of(4)), (jax.P(None, "stage"), jax.P("stage")))
        microbatches = placed[1][:, None]
        out, _ = jax.jit(
            lambda stack, x: run_pipeline(
                stage, stack, x, schedule=CircularSchedule(stages=2, microbatches=4)
            )
        )(placed[0], microbatches)
    once = norm.apply(params, x_of(4))
    assert_close(out[:, 0], 2 * norm.apply(params, once), 1e-5)


PAIRS = {
    "RMSNorm": (RMSNorm, modules.RMSNorm),
    "Embed": (Embed, modules.Embed),
    "Attention": (Attention, modules.Attention),
    "RoutedMoE": (RoutedMoE, modules.MoeBlock),
    "MLP": (MLP, modules.MlpBlock),
    "Mixtral": (DecoderLayer, modules.MixtralDecoderLayer),
    "Llama": (DecoderLayer, modules.LlamaDecoderLayer),
}


@pytest.mark.parametrize("name", PAIRS)
def test_classes_of_this_project_have_the_state_of_their_nnx_class_axes_and_all(name: str) -> None:
    native, linen = PAIRS[name]
    config = small_config().model
    if name == "Llama":
        config = dataclasses.replace(config, num_experts=1, num_experts_per_token=1)
    dtype = jnp.int32 if native is Embed else jnp.float32
    shape = (2, 3) if native is Embed else (2, 3, 16)

    def state(make) -> dict:
        flat = nnx.to_flat_state(nnx.state(nnx.eval_shape(make)))
        return {path: (v.get_metadata("logical_axes"), v.shape) for path, v in flat}

    example = jax.ShapeDtypeStruct(shape, dtype)
    ours = state(lambda: to_nnx(linen(config), example, rngs=0))
    assert ours == state(lambda: native(config, rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["step"])
def test_linen_layers_in_the_pipeline_are_the_nnx_layers_to_the_bit(gather: str) -> None:
    """On a mesh, from the same state, with weights gathered at their use and before."""
    model = small_config().model
    config = PipelineConfig(num_microbatches=2, fsdp_gather=gather)

    def make(layer) -> CircularPipeline:
        return CircularPipeline(config, layer, num_layers=2, rngs=nnx.Rngs(0))

    def linen(rngs: nnx.Rngs) -> nnx.Module:
        x = jax.ShapeDtypeStruct((2, 3, 16), jnp.float32)
        return to_nnx(modules.MixtralDecoderLayer(model), x, rngs=rngs)

    def step(pipeline: CircularPipeline, x: jax.Array):
        return jax.value_and_grad(lambda pipeline: jnp.sum(pipeline(x)[0] ** 2))(pipeline)

    with jax.set_mesh(mesh_of("stage=2,fsdp=2")):
        native = jax.jit(lambda: make(lambda rngs: DecoderLayer(model, rngs=rngs)))()
        wrapped = jax.jit(lambda: make(linen))()
        nnx.update(wrapped, nnx.state(native))
        x = jax.device_put(x_of(8), jax.P(("stage", "fsdp")))
        ours, theirs = jax.jit(step)(wrapped, x), jax.jit(step)(native, x)
    np.testing.assert_array_equal(ours[0], theirs[0])
    gradients = [arrays_by_path(nnx.state(gradient)) for gradient in (ours[1], theirs[1])]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_the_layout_of_a_linen_layer_is_replaced_where_weights_are_gathered_ahead() -> None:
    model = to_nnx(Layer(layout=Layout()), x_of(), rngs=0)
    gathered = Layout().gathered(("fsdp",))
    copy = with_layout(model, gathered)
    assert (copy.layout, model.layout) == (gathered, Layout())
    jax.tree.map(np.testing.assert_array_equal, copy(x_of()), model(x_of()))
    assert not hasattr(to_nnx(nn.Dense(3), x_of(), rngs=0), "layout")
