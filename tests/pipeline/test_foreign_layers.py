"""Layers that are not this library's, in a pipeline and one after the other as their authors do."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_close, float_rows, mesh_of, optax_promotion, small_config
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import linen_compat
from nnx_pipeline import (
    CircularPipeline,
    InputError,
    LayerPlace,
    Mixtral,
    PipelineConfig,
    Shared,
    abstract,
    create_pipeline,
    preset,
)
from nnx_pipeline.pipeline import ModelEnds, WeightOptions
from nnx_pipeline.train import abstract_state

pytestmark = pytest.mark.numbers

LAYERS, BATCH, LENGTH, WIDTH = 4, 8, 6, 4


class Form(NamedTuple):
    """How a pipeline runs the layers."""

    mesh: str
    options: dict[str, Any]

    @property
    def config(self) -> PipelineConfig:
        return PipelineConfig(num_microbatches=4, **self.options)


FORMS = {
    "no stages": Form("fsdp=2", {}),
    "no stages, 1F1B": Form("", {"schedule": "1f1b"}),
    "circular": Form("stage=2,fsdp=2", {}),
    "repeats": Form("stage=2", {"num_repeats": 2}),
    "accumulate": Form("stage=2,fsdp=2", {"num_repeats": 2, "backward": "accumulate"}),
    "1F1B": Form("stage=2,fsdp=2", {"schedule": "1f1b", "num_repeats": 2}),
    "auto": Form("stage=4,fsdp=2", {"sharding": "auto"}),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def loss_of(y: jax.Array) -> jax.Array:
    """A sum over the batch, so that microbatches add up to the same; nothing cancels in it."""
    return jnp.sum(jnp.sin(y) ** 2)


def by_layer(tree: Any) -> Any:
    """`[repeats, stages, layers per stage, …]` as `[layers, …]` in numpy."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(LAYERS, *leaf.shape[3:]), tree)


def in_pipeline(
    make: Callable[[nnx.Rngs], Any],
    form: Form,
    x: Any,
    *,
    weights: WeightOptions = WeightOptions(),
    **side: Any,
) -> Any:
    """Loss, gradients to a factor and to the weights, and the weights, these by layer.

    The factor is that of x and of what is `Shared`.
    """
    with jax.set_mesh(mesh_of(form.mesh, form.config.sharding)):
        pipeline = CircularPipeline(
            form.config, make, num_layers=LAYERS, rngs=nnx.Rngs(0), weights=weights
        )

        def loss(pipeline: CircularPipeline, first: jax.Array) -> jax.Array:
            shared = {
                name: Shared(each.value * first)
                for name, each in side.items()
                if isinstance(each, Shared)
            }
            if form.config.schedule != "1f1b":
                return loss_of(pipeline(x * first, **{**side, **shared})[0])
            ends = ModelEnds(
                lambda first, x: x * first, first, lambda _, y, __: loss_of(y), jnp.zeros(())
            )
            return pipeline.loss(ends, (x, x), {**side, **shared})[0]

        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(pipeline, jnp.float32(0.5))
        value, (gradients, first) = found
    return value, first, by_layer(nnx.state(gradients.layers)), by_layer(nnx.state(pipeline.layers))


def one_after_the_other(
    make: Callable[[nnx.Rngs], Any], weights: Any, call: Callable[..., jax.Array], x: Any
) -> Any:
    """The same of a plain loop; `call` gets a layer, x, the number of the layer, the factor."""
    with nnx.use_eager_sharding(False):  # without a mesh
        graph = nnx.graphdef(make(nnx.Rngs(0)))

    def loss(weights: Any, first: jax.Array) -> jax.Array:
        y = x * first
        for number in range(LAYERS):
            one = jax.tree.map(lambda leaf, number=number: leaf[number], weights)
            y = call(nnx.merge(graph, one), y, number, first)
        return loss_of(y)

    value, (gradients, first) = jax.jit(jax.value_and_grad(loss, (0, 1)))(weights, 0.5)
    return value, first, jax.tree.map(np.asarray, gradients)


# ---- a layer that depends on where it is -------------------------------------------------------


class Windowed(nnx.Module):
    """Attends to the last two tokens in layers of even number, to all before in the others."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def attend(self, x: jax.Array, window: jax.Array | int) -> jax.Array:
        row, column = np.indices((LENGTH, LENGTH))
        seen = (column <= row) & (row - column < window)
        scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", self.mix(x), x), -1e9)
        return (x + jax.nn.softmax(scores) @ x) / 2

    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, None]:
        return self.attend(x, jnp.where(place.layer % 2 == 0, 2, LENGTH)), None


@pytest.mark.slow(but=3)
@every_form
def test_windows_alternate(form: Form) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    *got, weights = in_pipeline(Windowed, form, x)

    def call(layer: Windowed, x: jax.Array, number: int, _: jax.Array) -> jax.Array:
        return layer.attend(x, LENGTH if number % 2 else 2)

    assert_close(tuple(got), one_after_the_other(Windowed, weights, call, x), 1e-5)


PLACES = 8  # so that two layers are in each visit of two stages with two repeats


def said(x: jax.Array, place: LayerPlace) -> jax.Array:
    """Adds the place in the row of the layer's number."""
    own = jnp.arange(PLACES) == place.layer
    words = jnp.stack(place)
    return x + jnp.where(own[:, None], words, 0).astype(x.dtype)


class Says(nnx.Module):
    """A layer without any use but to say where it is."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(jax.random.normal(rngs.params(), ()))

    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, None]:
        return said(x, place), None


class SaysInLinen(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x: jax.Array, place: LayerPlace) -> tuple[jax.Array, None]:
        self.param("scale", nn.initializers.ones, ())
        return said(x, place), None


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("style", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("mesh", "repeats", "stage_of", "repeat_of"),
    [
        ("", 1, [0] * 8, [0] * 8),
        ("stage=2", 1, [0, 0, 0, 0, 1, 1, 1, 1], [0] * 8),
        ("stage=2", 2, [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_a_layer_knows_its_stage_and_repeat(
    style: str, mesh: str, repeats: int, stage_of: list[int], repeat_of: list[int]
) -> None:
    config, x = PipelineConfig(num_microbatches=2, num_repeats=repeats), jnp.zeros((4, PLACES, 3))
    with jax.set_mesh(mesh_of(mesh)):
        if style == "nnx":
            y, _ = CircularPipeline(config, Says, num_layers=PLACES, rngs=nnx.Rngs(0))(x)
        else:
            kind = linen_compat.Pipeline if repeats == 1 else linen_compat.CircularPipeline
            linen = kind(config, SaysInLinen(), PLACES)
            y, _ = linen.apply(linen.init(jax.random.key(0), x), x)
    want = np.stack([range(PLACES), stage_of, repeat_of], axis=-1)
    np.testing.assert_array_equal(y, np.broadcast_to(want, (4, PLACES, 3)))


# ---- a side input that is not cut --------------------------------------------------------------


class Positioned(nnx.Module):
    """Adds a table of positions, scaled by its own weight."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, table: jax.Array, offset: jax.Array) -> tuple[Any, None]:
        return x + jnp.tanh(self.mix(x) + table + offset[:, None, None]), None


@pytest.mark.slow(but=3)
@every_form
@pytest.mark.parametrize("zero1", [False, True])
def test_a_side_input_may_be_shared_by_all_sequences(form: Form, zero1: bool) -> None:
    """A table with as many rows as the batch has sequences would otherwise be cut like it."""
    x, table = float_rows(BATCH, BATCH, WIDTH), float_rows(BATCH, WIDTH, seed=1)
    offset = np.linspace(0, 1, BATCH, dtype=np.float32)
    form = form._replace(mesh=form.mesh.replace("fsdp", "data")) if zero1 else form
    options = WeightOptions(zero1=("data",) if zero1 else ())
    *got, weights = in_pipeline(
        Positioned, form, x, weights=options, table=Shared(table), offset=offset
    )

    def call(layer: Positioned, x: jax.Array, _: int, factor: jax.Array) -> jax.Array:
        return layer(x, table * factor, offset)[0]

    assert_close(tuple(got), one_after_the_other(Positioned, weights, call, x), 1e-5)


# ---- weights that Flax's own metadata shards ---------------------------------------------------


class Partitioned(nnx.Module):
    """An MLP whose kernels are sharded as Flax has it: over a mesh axis, by a rule, by a name."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal()
        over_fsdp = nnx.with_partitioning(normal, (None, "fsdp"))
        by_rule = nnx.with_partitioning(normal, ("in", None), sharding_rules=(("in", "fsdp"),))
        named = nnx.with_metadata(
            nnx.initializers.zeros, out_sharding=("embed",), eager_sharding=False
        )
        self.open = nnx.Linear(WIDTH, 8, kernel_init=over_fsdp, rngs=rngs)
        self.close = nnx.Linear(8, WIDTH, kernel_init=by_rule, bias_init=named, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + self.close(jax.nn.gelu(self.open(x))), None


@pytest.mark.slow(but=3)
@every_form
@pytest.mark.parametrize("gather", ["use", "step"])
def test_weights_lie_where_flax_says(form: Form, gather: str) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    form = form._replace(options={**form.options, "fsdp_gather": gather})
    *got, weights = in_pipeline(Partitioned, form, x)

    def call(layer: Partitioned, x: jax.Array, *_: Any) -> jax.Array:
        return layer(x)[0]

    assert_close(tuple(got), one_after_the_other(Partitioned, weights, call, x), 1e-5)
    with jax.set_mesh(mesh_of(form.mesh, form.config.sharding)):
        made = CircularPipeline(form.config, Partitioned, num_layers=LAYERS, rngs=nnx.Rngs(0))
        fsdp = "fsdp" if "fsdp" in form.mesh else None
        stage = "stage" if "stage" in form.mesh else None
        for variable, own in (
            (made.layers.open.kernel, (None, fsdp)),
            (made.layers.close.kernel, (fsdp, None)),
            (made.layers.close.bias, (fsdp,)),
        ):
            value = variable.get_value()
            want = NamedSharding(jax.sharding.get_mesh(), P(None, stage, None, *own))
            assert value.sharding.is_equivalent_to(want, value.ndim)


class Columns(nnx.Module):
    """An MLP whose hidden features are sharded, so that the second product sums over devices."""

    says_where = True

    def __init__(self, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal()
        columns = nnx.with_partitioning(normal, (None, "tensor"))
        rows = nnx.with_partitioning(normal, ("tensor", None))
        self.up = nnx.Linear(WIDTH, 8, kernel_init=columns, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, WIDTH, kernel_init=rows, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        where = jax.typeof(x).sharding if self.says_where else None
        hidden = jax.nn.gelu(self.up(x))
        return x + jnp.matmul(hidden, self.down.kernel[...], out_sharding=where), None


class SaysNothing(Columns):
    says_where = False


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "form",
    [
        Form("tensor=2", {}),
        Form("stage=2,tensor=2", {"num_repeats": 2}),
        Form("stage=2,data=2,tensor=2", {"backward": "accumulate"}),
        Form("stage=2,fsdp=2,tensor=2", {"schedule": "1f1b"}),
        Form("stage=2,fsdp=2,tensor=2", {"sharding": "auto"}),
    ],
    ids=str,
)
def test_a_product_over_a_sharded_axis(form: Form) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    make = SaysNothing if form.config.sharding == "auto" else Columns
    *got, weights = in_pipeline(make, form, x)
    want = one_after_the_other(SaysNothing, weights, lambda layer, x, *_: layer(x)[0], x)
    assert_close(tuple(got), want, 1e-5)


def test_a_product_that_does_not_say_where_its_result_is() -> None:
    words = r"contracting_spec.*sharding='auto'.*or give the product in the layer an out_sharding"
    with pytest.raises(InputError, match=words):
        in_pipeline(SaysNothing, Form("stage=2,tensor=2", {}), float_rows(BATCH, LENGTH, WIDTH))


class LooksUp(nnx.Module):
    """Adds a row of its table for each token."""

    says_where = False

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rows = nnx.Embed(5, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, None]:
        if not self.says_where:
            return x + self.rows(tokens), None
        rows = jax.P(*jax.typeof(tokens).sharding.spec, None)
        return x + self.rows.embedding[...].at[tokens].get(out_sharding=rows), None


class SaysRows(LooksUp):
    says_where = True


def test_a_lookup_that_jax_cannot_type_is_named_by_its_line_and_both_cures_work() -> None:
    x, tokens = float_rows(BATCH, LENGTH, WIDTH), jnp.arange(BATCH * LENGTH) % 5

    def run(make: type[nnx.Module], sharding: str) -> tuple[jax.Array, jax.Array]:
        config = PipelineConfig(num_microbatches=2, sharding=sharding)
        with jax.set_mesh(mesh_of("stage=2,data=2", sharding)):
            pipeline = CircularPipeline(config, make, num_layers=2, rngs=nnx.Rngs(0))
            call = jax.jit(lambda pipeline, x, tokens: pipeline(x, tokens=tokens)[0])
            y = call(pipeline, x, tokens.reshape(BATCH, LENGTH))
            return jax.device_get((y, pipeline.layers.rows.embedding[...]))

    with pytest.raises(InputError) as refused:
        run(LooksUp, "explicit")
    said = str(refused.value)
    assert "test_foreign_layers.py:" in said.split(" does what JAX cannot type")[0]
    assert "sharding='auto'" in said
    assert "table.at[tokens].get(out_sharding=rows)" in said
    assert "convolution" not in said
    assert "scan" not in said
    for make, sharding in ((LooksUp, "auto"), (SaysRows, "explicit")):
        y, tables = run(make, sharding)
        wanted = np.asarray(x, np.float64)
        for table in np.asarray(tables, np.float64).reshape(2, 5, WIDTH):
            wanted = wanted + table[np.asarray(tokens).reshape(BATCH, LENGTH)]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize("factored", [False, True], ids=["adam", "adafactor"])
def test_an_abstract_pipeline_is_sharded_as_a_real_one(mode: str, factored: bool) -> None:
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=2) if factored else optax.adam(1e-3)

    def make() -> Any:
        pipeline = CircularPipeline(PipelineConfig(), Partitioned, num_layers=8, rngs=nnx.Rngs(0))
        table = nnx.Param(jnp.ones((4, 4)))
        return pipeline, nnx.Optimizer(pipeline, optimizer, wrt=nnx.Param), table

    with jax.set_mesh(mesh_of("stage=2,fsdp=4", mode)), optax_promotion():
        found, real = abstract(make), make()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(real), strict=True):
        assert isinstance(one, jax.ShapeDtypeStruct)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Of a factored moment no metadata says how it is sharded.
        if not factored or one.ndim == real[0].layers.open.kernel.ndim:
            places = one.sharding, other.sharding
            assert len({place.shard_shape(one.shape) for place in places}) == 1, places


def test_an_abstract_model_is_that_of_the_training_state() -> None:
    config = preset("tiny")
    mesh = mesh_of("stage=2,fsdp=2", "auto")
    with jax.set_mesh(mesh):
        found = abstract(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        state = abstract_state(config, mesh)
    places = [
        [leaf.sharding.spec for leaf in jax.tree.leaves(tree)] for tree in (found, state.model)
    ]
    assert places[0] == places[1]
    assert any(map(any, places[0]))
    unsharded = abstract(lambda: Mixtral(config, rngs=nnx.Rngs(0)))  # without a mesh
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(unsharded))


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_an_axis_that_neither_layout_nor_mesh_has(mode: str) -> None:
    def layer(rngs: nnx.Rngs) -> nnx.Module:
        init = nnx.with_partitioning(
            nnx.initializers.normal(), (None, "fdsp"), eager_sharding=False
        )
        return nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

    with (
        jax.set_mesh(mesh_of("stage=2,fsdp=2", mode)),
        pytest.raises(InputError, match=r"axis 'fdsp' is neither a logical .* did you mean 'fsdp'"),
    ):
        CircularPipeline(PipelineConfig(), layer, num_layers=2, rngs=nnx.Rngs(0))


class Nested(nnx.Module):
    """A layer that is a pipeline itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = CircularPipeline(PipelineConfig(), Windowed, num_layers=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return self.inner(x)


def sharded(axes: tuple[Any, ...], size: int = 4) -> Callable[[nnx.Rngs], nnx.Module]:
    """Makes a layer with a kernel `[size, 4]` that is sharded over these axes."""
    init = nnx.with_partitioning(nnx.initializers.normal(), axes, eager_sharding=False)
    return lambda rngs: nnx.Linear(size, 4, kernel_init=init, rngs=rngs)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            sharded((None, "stage")),
            r"\.kernel.*\[4, 4\].*twice over the mesh axis 'stage' \(a pipe",
        ),
        (sharded(("fsdp", ("tensor", "fsdp"))), "twice over the mesh axis 'fsdp'; name each"),
        (sharded(("embed", "fsdp")), "twice over the mesh axis 'fsdp'; name each"),
        (sharded(("fsdp", None), 3), "3 entries do not split over 2 devices; .*or None for an"),
        (Nested, r"\.inner.*twice over the mesh axis 'stage' \(a pipeline .* no pipeline in a"),
    ],
)
def test_axes_that_do_not_fit_the_mesh(make: Any, words: str, mode: str) -> None:
    with (
        jax.set_mesh(mesh_of("stage=2,fsdp=2", mode)),
        pytest.raises(InputError, match=words),
    ):
        CircularPipeline(PipelineConfig(), make, num_layers=2, rngs=nnx.Rngs(0))


# ---- Flax's transformations inside a layer -----------------------------------------------------


@nnx.jit
def mixed(mix: nnx.Linear, x: jax.Array) -> jax.Array:
    return jnp.tanh(mix(x))


@nnx.remat
def mixed_again(mix: nnx.Linear, x: jax.Array) -> jax.Array:
    return jnp.sin(mixed(mix, x))


class Transformed(nnx.Module):
    """Applies its module under `nnx.jit` and `nnx.remat`, which write all its arrays anew."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        return x + mixed_again(self.mix, x), None


@pytest.mark.slow(but=3)
@every_form
def test_transformations_of_flax_inside_a_layer(form: Form) -> None:
    x = float_rows(BATCH, LENGTH, WIDTH)
    *got, weights = in_pipeline(Transformed, form, x)

    def call(layer: Transformed, x: jax.Array, *_: Any) -> jax.Array:
        return layer(x)[0]

    assert_close(tuple(got), one_after_the_other(Transformed, weights, call, x), 1e-5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mesh", ["", "stage=2", "stage=4,fsdp=2"])
def test_forward_mode(mesh: str) -> None:
    """Also with several layers per stage, of which each waits for the gradient of the next."""
    x = jnp.asarray(float_rows(BATCH, LENGTH, WIDTH))
    form = Form(mesh, {"num_repeats": 1})

    def derivatives(function: Callable[[jax.Array], jax.Array]) -> Any:
        def along(function: Any) -> Any:
            return lambda x: jax.jvp(function, (x,), (jnp.cos(x),))

        return jax.jit(lambda x: (along(function)(x), along(jax.grad(function))(x)))(x)

    with jax.set_mesh(mesh_of(mesh)):
        pipeline = CircularPipeline(form.config, Transformed, num_layers=LAYERS, rngs=nnx.Rngs(0))
        got = derivatives(lambda x: loss_of(pipeline(x)[0]))
        weights = by_layer(pipeline.layers)

    def plain(x: jax.Array) -> jax.Array:
        for number in range(LAYERS):
            x, _ = jax.tree.map(lambda leaf, number=number: leaf[number], weights)(x)
        return loss_of(x)

    assert_close(got, derivatives(plain), 2e-5)


@nnx.jit
def moved(mix: nnx.Linear) -> None:
    mix.bias[...] = mix.bias[...] + 1


def test_a_change_inside_a_transformation_is_refused() -> None:
    class Changed(Transformed):
        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            moved(self.mix)
            return super().__call__(x)

    with jax.set_mesh(mesh_of("stage=2")):
        config = PipelineConfig(num_microbatches=4)
        pipeline = CircularPipeline(config, Changed, num_layers=2, rngs=nnx.Rngs(0))
        with pytest.raises(InputError, match=r"a stage changed .*bias.* of its parameters"):
            pipeline(float_rows(BATCH, LENGTH, WIDTH))


@pytest.mark.parametrize("gather", ["use", "step", "prefetch"])
def test_weights_are_not_rounded_for_layers_of_another_dtype_than_the_model(gather: str) -> None:
    """A config of bfloat16 says nothing of layers that compute in float32."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            start = nnx.initializers.constant(1.001)  # no number of bfloat16
            self.linear = nnx.Linear(4, 4, use_bias=False, kernel_init=start, rngs=rngs)

        def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
            return self.linear(x), None

    config = small_config(
        model={"num_layers": 2, "dtype": "bfloat16"},
        pipeline={"num_microbatches": 2, "fsdp_gather": gather},
    )
    mesh = mesh_of("stage=2,fsdp=2")
    pipeline = create_pipeline(config, Layer, mesh, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        y, _ = jax.jit(lambda pipeline, x: pipeline(x))(pipeline, jnp.ones((4, 4)))
    np.testing.assert_allclose(y, (4 * 1.001) ** 2, rtol=1e-6)
