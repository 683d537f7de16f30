"""NNX classes as Linen modules: names, values, state, random numbers, no constructor in apply."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from test_deepseek_linen import DEEPSEEK

from linen_compat import modules
from linen_compat.bridge import to_linen
from linen_compat.bridge._blueprint import blueprint
from linen_compat.bridge._paths import flatten
from nnx_pipeline import (
    MLP,
    Attention,
    DecoderLayer,
    Embed,
    InputError,
    Mixtral,
    RMSNorm,
    RoutedMoE,
)
from nnx_pipeline.modules import LatentAttention
from tests.helpers import arrays_by_path, float_rows, mesh_of, small_config

pytestmark = pytest.mark.jax_alone

CONFIG = small_config().model
MADE: list[str] = []


class Block(nnx.Module):
    """A layer with a parameter of its own, a list of modules, and a count of constructions."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        MADE.append("Block")
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.norm = RMSNorm(CONFIG, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(width), logical_axes=("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(self.norm(x)))
        return x * self.gain[...]

    def double(self, x: jax.Array) -> jax.Array:
        return 2 * self(x)


def x_of(width: int = 16) -> jax.Array:
    return float_rows(2, 3, width)


def native_of(module: nn.Module, variables: dict, make) -> nnx.Module:
    """The NNX module with the wrapper's parameters, put there in the order of the graph."""
    native = make(rngs=nnx.Rngs(1))
    flat = flatten(nn.meta.unbox(variables))
    state = {slot.nnx: flat[slot.linen] for slot in blueprint(module.recipe).slots}
    nnx.update(native, nnx.from_flat_state(state.items()))
    return native


PAIRS = {
    "RMSNorm": (RMSNorm, modules.RMSNorm),
    "Embed": (Embed, modules.Embed),
    "Attention": (Attention, modules.Attention),
    "MoeBlock": (RoutedMoE, modules.MoeBlock),
    "MlpBlock": (MLP, modules.MlpBlock),
    "MixtralDecoderLayer": (DecoderLayer, modules.MixtralDecoderLayer),
    "Qwen3MoeDecoderLayer": (DecoderLayer, modules.Qwen3MoeDecoderLayer),
    "LlamaDecoderLayer": (DecoderLayer, modules.LlamaDecoderLayer),
    "LatentAttention": (LatentAttention, modules.LatentAttention),
    "DeepSeekMoELayer": (DecoderLayer, modules.DeepSeekMoELayer),
    "DeepSeekDenseLayer": (DecoderLayer, modules.DeepSeekDenseLayer),
}
DEEPSEEK_CONFIG = small_config(model=DEEPSEEK).model


@pytest.mark.parametrize("name", PAIRS)
def test_classes_of_this_project_have_the_tree_of_their_linen_class_boxes_and_all(
    name: str,
) -> None:
    ours, native = PAIRS[name]
    dense = dataclasses.replace(CONFIG, num_experts=1, num_experts_per_token=1)
    config = dense if name == "LlamaDecoderLayer" else CONFIG
    config = dataclasses.replace(config, qk_norm=name.startswith("Qwen3"))
    if "DeepSeek" in name or name == "LatentAttention":
        config = DEEPSEEK_CONFIG
    if name == "DeepSeekDenseLayer":
        config = dataclasses.replace(config.of_dense_layers, q_lora_rank=None)
    x = jnp.zeros((2, 3), jnp.int32) if ours is Embed else x_of()

    def tree(module: nn.Module) -> dict:
        boxes = flatten(jax.eval_shape(module.init, jax.random.key(0), x))
        return {path: (box.names, box.value.shape) for path, box in boxes.items()}

    assert tree(to_linen(ours, config)) == tree(native(config))


@pytest.mark.slow
def test_a_layer_is_the_program_and_the_numbers_of_the_linen_layer_to_the_bit() -> None:
    wrapped, native = to_linen(DecoderLayer, CONFIG), modules.MixtralDecoderLayer(CONFIG)
    variables = nn.meta.unbox(native.init(jax.random.key(0), x_of()))

    def step(module: nn.Module):
        def loss(variables: dict, x: jax.Array) -> jax.Array:
            return jnp.sum(module.apply(variables, x)[0] ** 2)

        return jax.value_and_grad(loss)

    programs = [jax.make_jaxpr(step(module))(variables, x_of()) for module in (wrapped, native)]
    assert str(programs[0]) == str(programs[1])
    ours, theirs = (jax.jit(step(module))(variables, x_of()) for module in (wrapped, native))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_tree_of_the_whole_model_has_linens_names_in_its_layers_alone() -> None:
    config = small_config()
    wrapped = to_linen(Mixtral, config)
    made = jax.eval_shape(wrapped.init, jax.random.key(0), jnp.zeros((2, 3), jnp.int32))
    paths = {"/".join(path) for path in flatten(made)}
    assert "params/pipeline/layers/self_attention/query/kernel" in paths
    assert {"params/embedding/embedding", "params/norm/scale", "params/head"} <= paths


def test_paths_of_other_classes_are_joined_and_known_classes_inside_keep_their_names() -> None:
    variables = to_linen(Block, 16).init(jax.random.key(0), x_of())
    assert sorted("/".join(path) for path in flatten(variables)) == [
        "params/gain",
        "params/layers/0/bias",
        "params/layers/0/kernel",
        "params/layers/1/bias",
        "params/layers/1/kernel",
        "params/norm/scale",
    ]
    assert variables["params"]["gain"].names == ("embed",)
    assert isinstance(variables["params"]["layers"]["0"]["kernel"], jax.Array)


def test_other_metadata_reaches_linen_as_boxes() -> None:
    class Partitioned(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Param(jnp.ones((2, 2)), out_sharding=("data", None), eager_sharding=False)
            box = nn.Partitioned(None, names=("stage", None))
            self.b = nnx.Param(jnp.ones((2, 2)), linen_box=box)

        def __call__(self) -> jax.Array:
            return self.a[...] + self.b[...]

    params = to_linen(Partitioned).init(jax.random.key(0))["params"]
    assert (params["a"].names, params["b"].names) == (("data", None), ("stage", None))


def test_the_constructor_runs_once_per_class_and_arguments_and_never_in_apply() -> None:
    module = to_linen(Block, 8 * 2)
    variables = module.init(jax.random.key(0), x_of())
    MADE.clear()
    for _ in range(3):
        jax.make_jaxpr(module.apply)(variables, x_of())
        jax.make_jaxpr(to_linen(Block, 16).apply)(variables, x_of())
    assert MADE == []
    to_linen(Block, 17)
    to_linen(Block, 17)
    assert MADE == ["Block"]


def test_the_program_is_that_of_the_nnx_module() -> None:
    module = to_linen(Block, 16)
    variables = nn.meta.unbox(module.init(jax.random.key(0), x_of()))
    native = native_of(module, variables, lambda rngs: Block(16, rngs=rngs))

    def loss(call, weights):
        return jax.value_and_grad(lambda weights: jnp.sum(call(weights)))(weights)

    ours = jax.make_jaxpr(lambda v: loss(lambda v: module.apply(v, x_of()), v)[0])(variables)
    theirs = jax.make_jaxpr(lambda m: loss(lambda m: m(x_of()), m)[0])(native)
    assert str(ours) == str(theirs)


def test_another_method_is_called_by_name() -> None:
    module = to_linen(Block, 16)
    variables = module.init(jax.random.key(0), x_of())
    once, twice = (module.apply(variables, x_of(), nnx_method=m) for m in ("__call__", "double"))
    np.testing.assert_array_equal(2 * once, twice)


class Stack(nn.Module):
    """Wrapped layers within a Linen module: one by name, others scanned, with or without remat."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = to_linen(Block, 16, name="first")(x)
        layer = to_linen(Block, 16, name="layers")

        def body(layer: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return layer(x), None

        scan = nn.scan(
            nn.remat(body) if self.remat else body,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(layer, x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_within_a_linen_module_under_scan_and_remat(remat: bool) -> None:
    model = Stack(remat)
    variables = model.init(jax.random.key(0), x_of())
    stacked = variables["params"]["layers"]
    assert stacked["gain"].names == ("embed", "layers")
    assert stacked["layers"]["0"]["kernel"].shape == (16, 3, 16)
    kernels = np.moveaxis(np.asarray(stacked["layers"]["0"]["kernel"]), 1, 0)
    assert not np.array_equal(kernels[0], kernels[1]), "each layer has values of its own"
    values = nn.meta.unbox(variables)["params"]
    x = to_linen(Block, 16).apply({"params": values["first"]}, x_of())
    for layer in range(3):
        own = jax.tree.map(lambda leaf, at=layer: leaf[:, at], values["layers"])
        x = to_linen(Block, 16).apply({"params": own}, x)
    MADE.clear()
    np.testing.assert_allclose(model.apply(variables, x_of()), x, rtol=1e-6, atol=1e-6)
    gradients = jax.grad(lambda v: jnp.sum(model.apply(v, x_of())))(variables)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients["params"]["layers"]["layers"]))
    assert MADE == []


def test_under_vmap_each_copy_has_its_own_variables() -> None:
    copies = nn.vmap(
        lambda module, x: module(x),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=2,
        metadata_params={nn.PARTITION_NAME: "pair"},
    )

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return copies(to_linen(Block, 16, name="pair"), x)

    variables = Pair().init(jax.random.key(0), x_of())
    out = Pair().apply(variables, x_of())
    for index in range(2):
        own = jax.tree.map(lambda leaf, at=index: leaf[at], nn.meta.unbox(variables))
        alone = to_linen(Block, 16).apply({"params": own["params"]["pair"]}, x_of())
        np.testing.assert_allclose(out[index], alone, rtol=1e-6, atol=1e-6)


def test_one_module_called_twice_keeps_one_set_of_variables() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = to_linen(Block, 16, name="layer")
            return layer(layer(x))

    out, variables = Twice().init_with_output(jax.random.key(0), x_of())
    np.testing.assert_allclose(out, Twice().apply(variables, x_of()), rtol=1e-6, atol=1e-6)


def without(tree: dict, key: str) -> dict:
    return {name: child for name, child in tree.items() if name != key}


def test_unknown_missing_and_misshapen_variables_are_named() -> None:
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return to_linen(Block, 16, name="block")(x)

    params = nn.meta.unbox(Outer().init(jax.random.key(0), x_of())["params"])
    block = params["block"]

    def apply(**changes: object) -> None:
        Outer().apply({"params": {"block": {**block, **changes}}}, x_of())

    apply()
    renamed = without(block, "gain")
    with pytest.raises(
        InputError,
        match=r"params/block/gian is not a variable of Block; the nearest .* is params/block/gain",
    ):
        Outer().apply({"params": {"block": {**renamed, "gian": block["gain"]}}}, x_of())
    with pytest.raises(
        InputError, match=r"params/block/norm/scale, a variable of Block, is not in the tree"
    ):
        Outer().apply({"params": {"block": without(block, "norm")}}, x_of())
    with pytest.raises(
        InputError, match=r"params/block/gain has shape \(3,\) and Block needs \(16,"
    ):
        apply(gain=jnp.ones(3))
    with pytest.raises(InputError, match=r"cache/block/index is not a variable of Block"):
        Outer().apply({"params": params, "cache": {"block": {"index": jnp.zeros(())}}}, x_of())
    with pytest.raises(InputError, match=r"is not in the tree \(and 5 more\); the tree is empty"):
        to_linen(Block, 16).apply({}, x_of())


def test_what_cannot_be_wrapped_is_refused() -> None:
    class Loose(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.data(jnp.ones(3))

    class Late(nnx.Module):
        def __call__(self) -> None:
            self.new = nnx.Param(jnp.ones(3))

    with pytest.raises(
        InputError, match=r"Loose holds an array at table that is not in an nnx\.Variable"
    ):
        to_linen(Loose)
    with pytest.raises(InputError, match=r"Late\.new was created in the call"):
        to_linen(Late).apply({})
    with pytest.raises(
        InputError, match=r"cannot be hashed \(unhashable type: 'list'\); give tuples"
    ):
        to_linen(Block, [16])


def test_a_layer_on_a_mesh_with_explicit_axes_is_born_in_its_place() -> None:
    with jax.set_mesh(mesh_of("fsdp=4")):
        module = to_linen(DecoderLayer, CONFIG)
        x = jax.device_put(jnp.zeros((4, 3, 16)), jax.P("fsdp"))
        variables = jax.jit(module.init)(jax.random.key(0), x)
        params = arrays_by_path(nn.meta.unbox(variables["params"]))
        assert params["self_attention/query/kernel"].sharding.spec == jax.P("fsdp", None, None)
        out, _ = jax.jit(module.apply)(nn.meta.unbox(variables), x)
        assert out.sharding.spec[0] == "fsdp"
