"""The dtype of gradients: where they add up, travel and reach the optimizer."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    carries,
    equations,
    fresh_model,
    fresh_state,
    mesh_of,
    optax_promotion,
    packed_batch,
    replace,
    small_config,
)

from nnx_pipeline import Config, Layout, Mixtral
from nnx_pipeline.config._remat import FULL
from nnx_pipeline.ops._experts import DenseExperts, ExpertKernels
from nnx_pipeline.train import abstract_state, loss_of, step
from nnx_pipeline.train.optimizer import clip_by_global_norm, global_norm, in_dtype
from nnx_pipeline.train.step import loss_and_gradients, train_step

pytestmark = pytest.mark.numbers

LOOPS = {
    "accumulate": {"backward": "accumulate", "num_microbatches": 2},
    "1f1b": {"schedule": "1f1b", "num_microbatches": 4},
    "step": {"fsdp_gather": "step", "num_microbatches": 2, "num_repeats": 2},
    "1f1b step": {"schedule": "1f1b", "fsdp_gather": "step", "num_microbatches": 4},
    "prefetch": {"fsdp_gather": "prefetch", "num_microbatches": 2},
    "autodiff": {"num_microbatches": 2},
}


def config_of(loop: str, grad_dtype: str | None) -> Config:
    return small_config(pipeline=LOOPS[loop], train={"grad_dtype": grad_dtype})


def gradients(config: Config, mesh: jax.sharding.Mesh) -> Any:
    batch = jax.tree.map(jnp.asarray, packed_batch(config))
    model = fresh_model(config, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(lambda model: loss_of(model, batch)[0]))(model)


def jaxpr_of(config: Config, mesh: jax.sharding.Mesh) -> Any:
    batch = jax.tree.map(jnp.asarray, packed_batch(config))
    with jax.set_mesh(mesh):
        model = jax.eval_shape(lambda: Mixtral(config, rngs=nnx.Rngs(0)))
        return jax.make_jaxpr(jax.grad(lambda model: loss_of(model, batch)[0]))(model)


class Carried(NamedTuple):
    """What a loop carries in the shape of the experts' kernels of a stage."""

    dtypes: set[str]
    elements: int  # on one device


def expert_accumulators(jaxpr: Any, config: Config) -> list[Carried]:
    """Those of each loop that carries any: arrays of their own per layer and repeat, or stacked."""
    model = config.model
    kernel = (model.num_experts, model.embed_dim, model.mlp_dim)  # embed_dim = mlp_dim
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "scan":
            types = [v.aval for v in carries(equation) if v.aval.shape[-3:] == kernel]
            local = [math.prod(x.sharding.shard_shape(x.shape)) for x in types]
            found.append(Carried({str(x.dtype) for x in types}, sum(local)))
    return [carried for carried in found if carried.elements]


def elements_of_experts(config: Config, devices: int) -> int:
    """In the kernels of all layers, spread over so many devices."""
    model = config.model
    kernel = model.num_experts * model.embed_dim * model.mlp_dim
    return 3 * model.num_layers * kernel // devices


def scattered(jaxpr: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    for equation in equations(jaxpr):
        if equation.primitive.name == "reduce_scatter":
            yield equation.outvars[0].aval.shape, str(equation.outvars[0].aval.dtype)


def once_or_twice(loop: str) -> int:
    """How many loops add up gradients: of 1F1B its steady state, and its end."""
    return 2 if "1f1b" in loop else 1


# Without a dtype of gradients those of the parameters: which loop it is decides nothing of that.
@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("loop", "dtype"),
    [
        *((loop, "bfloat16") for loop in ("accumulate", "1f1b", "step", "1f1b step", "prefetch")),
        *((loop, None) for loop in ("accumulate", "1f1b step")),
    ],
)
def test_the_loop_adds_up_in_the_dtype(loop: str, dtype: str | None) -> None:
    """And in the sharding of the weights: no loop carries a gradient that is whole over `fsdp`."""
    config = config_of(loop, dtype)
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    each = Carried({dtype or "float32"}, elements_of_experts(config, devices=4))
    assert expert_accumulators(jaxpr, config) == [each] * once_or_twice(loop)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("loop", ["accumulate", "1f1b", "step", "1f1b step"])
@pytest.mark.parametrize(("layers", "repeats"), [(20, 2), (12, 3)], ids=["layers", "repeats"])
def test_what_is_stacked_adds_up_the_same(loop: str, layers: int, repeats: int) -> None:
    """More than 4 layers per visit are one array in the loop, and so are more than 2 repeats.

    The loops over layers, forward and backward, carry the accumulators too, of two repeats.
    """
    config = replace(config_of(loop, "bfloat16"), "model", num_layers=layers)
    config = replace(config, "pipeline", num_repeats=repeats)
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    each = Carried({"bfloat16"}, elements_of_experts(config, devices=4))
    in_layers = 3 if repeats == 2 and "step" not in loop else 1
    assert expert_accumulators(jaxpr, config) == [each] * once_or_twice(loop) * in_layers


def test_prefetch_of_several_repeats_adds_up_two_whole_gradients() -> None:
    """The gathered weights are in float32 and the gradients in bfloat16, each of one repeat."""
    config = replace(config_of("prefetch", "bfloat16"), "model", num_layers=6)
    config = replace(config, "pipeline", num_repeats=3)
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    repeat = elements_of_experts(config, devices=2) // 3
    weights, gradient, both = {"float32"}, {"bfloat16"}, {"float32", "bfloat16"}
    assert expert_accumulators(jaxpr, config) == [
        Carried(weights, repeat),  # forward, from one turn to the next
        Carried(gradient, repeat),  # backward: the last ticks,
        Carried(both, 2 * repeat),  # from one turn to the next,
        Carried(gradient, 2 * repeat),  # within a turn, at two repeats,
        Carried(gradient, repeat),  # where a repeat is held,
        Carried(gradient, repeat),  # and the first ticks
    ]


@pytest.mark.parametrize("loop", ["step", "1f1b step", "prefetch"])
def test_scales_of_norms_have_an_accumulator_on_each_device(loop: str) -> None:
    """They are not sharded over `fsdp`: each device along it adds up those of its own sequences."""
    config = replace(config_of(loop, "bfloat16"), "model", embed_dim=48)  # found in no other size
    jaxpr = jaxpr_of(config, mesh_of("stage=2,fsdp=2"))
    found = [
        (variable.aval.shape[:2], variable.aval.sharding.spec[:2])
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        for variable in carries(equation)
        if variable.aval.dtype == jnp.bfloat16 and variable.aval.shape[2:] in ((48,), (1, 48))
    ]
    # Two per layer of a stage; the copies of the two devices are an axis.
    each = ((2, 2), ("stage", "fsdp"))
    assert found == [each] * 2 * 2 * once_or_twice(loop)


# (fsdp_gather, repeats, grad_dtype, the dtype of the sums over fsdp)
BACK = [
    ("step", 2, None, "bfloat16"),
    ("step", 2, "bfloat16", "bfloat16"),
    ("prefetch", 1, None, "bfloat16"),
    ("prefetch", 2, None, "float32"),
    ("prefetch", 2, "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize(("gather", "repeats", "dtype", "over_fsdp"), BACK)
def test_weights_held_gathered_give_their_gradients_back_in_the_dtype(
    gather: str, repeats: int, dtype: str | None, over_fsdp: str
) -> None:
    """Over `fsdp` each visit in the dtype of the activations, where a reduce-scatter follows it.

    Several repeats of `prefetch` add up a whole repeat first, and scatter it in the dtype of the
    accumulators. Over `data` all are summed once, in that dtype too. Of each layer 8 arrays are
    scattered. The scales of its two norms are not sharded over `fsdp`, and are summed over both
    mesh axes at once.
    """
    config = small_config(
        model={"dtype": "bfloat16", "num_layers": 2 * repeats},  # one layer per visit
        pipeline={"fsdp_gather": gather, "num_repeats": repeats, "num_microbatches": 2},
        train={"grad_dtype": dtype},
    )
    jaxpr = jaxpr_of(config, mesh_of("data=2,stage=2,fsdp=2"))
    # A window scatters repeats in two places: in its loop, and the first repeat after it.
    times = 2 if gather == "prefetch" and repeats > 1 else 1
    # Those of embedding and head have fewer axes, and dtypes of their own.
    layers = [dtype for shape, dtype in scattered(jaxpr) if len(shape) > 2]
    assert layers == [over_fsdp] * 8 * times
    summed = {axes: [] for axes in (("data",), ("data", "fsdp"))}
    for equation in equations(jaxpr):
        if equation.primitive.name == "psum" and equation.outvars[0].aval.ndim > 2:
            summed[equation.params["axes"]].append(str(equation.outvars[0].aval.dtype))
    total = dtype or "float32"
    assert summed == {("data",): [total] * 8 * times, ("data", "fsdp"): [total] * 2 * times}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accumulate", "autodiff"])
def test_values_in_bfloat16(loop: str) -> None:
    """Within a few roundings of bfloat16 (2⁻⁸ each) of the gradients in float32."""
    mesh = mesh_of("stage=2,fsdp=2")
    exact = gradients(config_of(loop, "float32"), mesh)
    rough = gradients(config_of(loop, "bfloat16"), mesh)
    assert_close(rough, exact, 2**-6)
    pairs = zip(jax.tree.leaves(rough), jax.tree.leaves(exact), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    assert same == (loop == "autodiff"), "JAX adds up in the dtype of the parameters"


@pytest.mark.parametrize("loop", ["1f1b", "autodiff"])
def test_the_optimizer_gets_the_dtype(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either schedule; the state keeps the dtypes it had, and the metrics theirs."""
    config = config_of(loop, "bfloat16")
    mesh, got = mesh_of("stage=2,fsdp=2"), []
    make = step.make_optimizer

    def make_optimizer(settings: Any) -> Any:
        real = make(settings)

        def update(updates: Any, *rest: Any, **more: Any) -> Any:
            got.extend(str(leaf.dtype) for leaf in jax.tree.leaves(updates))
            return real.update(updates, *rest, **more)

        return real._replace(update=update)

    monkeypatch.setattr(step, "make_optimizer", make_optimizer)
    with jax.set_mesh(mesh), optax_promotion():
        state = abstract_state(config, mesh)
        batch = jax.tree.map(jnp.asarray, packed_batch(config))
        new, metrics = jax.eval_shape(train_step, state, batch)
    assert set(got) == {"bfloat16"}
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    assert all(metric.dtype == jnp.float32 for metric in jax.tree.leaves(metrics))


@pytest.mark.parametrize("largest", [0.1, 1e4], ids=["clipped", "left alone"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_are_clipped_by_a_norm_in_float32(dtype: str, largest: float) -> None:
    """Against float64; a sum of this many squares in bfloat16 comes to rest far below."""
    generator = np.random.default_rng(0)
    tree = {name: jnp.asarray(generator.normal(size=300_000), dtype) for name in "ab"}
    exact = {name: np.asarray(leaf, np.float64) for name, leaf in tree.items()}
    norm = math.sqrt(sum(np.sum(leaf**2) for leaf in exact.values()))
    assert float(global_norm(tree)) == pytest.approx(norm, rel=1e-5)
    clip = clip_by_global_norm(largest)
    clipped, _ = jax.jit(clip.update)(tree, clip.init(tree))
    share = min(1.0, largest / norm)
    for name, leaf in clipped.items():
        assert leaf.dtype == dtype
        want = np.asarray(jnp.asarray(share * exact[name], dtype), np.float64)
        rounding = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(leaf, np.float64), want, rtol=rounding, atol=1e-6)


def test_clipping_in_float32_is_that_of_optax() -> None:
    tree = {"a": jnp.linspace(-3.0, 4.0, 1000), "b": jnp.ones((7, 5))}
    ours, theirs = clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)
    assert ours.init(tree) == theirs.init(tree)
    assert_close(ours.update(tree, None)[0], theirs.update(tree, None)[0], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grad_dtype", ["bfloat16", None])
def test_a_step_clips_and_reports_by_that_norm(
    grad_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AdamW gets is of length `clip_norm`, and the metric says how long the gradients were."""
    config = small_config(
        model={"vocab_size": 512, "embed_dim": 64},
        train={"grad_dtype": grad_dtype, "clip_norm": 1e-3},
    )
    made, got = optax.adamw, []

    def adamw(*args: Any, **kwargs: Any) -> Any:
        real = made(*args, **kwargs)

        def update(updates: Any, *rest: Any, **more: Any) -> Any:
            got.append(updates)
            return real.update(updates, *rest, **more)

        return real._replace(update=update)

    monkeypatch.setattr(optax, "adamw", adamw)
    mesh = mesh_of("")
    with jax.set_mesh(mesh), optax_promotion():
        state = fresh_state(config, mesh)
        batch = jax.tree.map(jnp.asarray, packed_batch(config))

        def step(state: Any, batch: Any) -> Any:
            _, metrics = train_step(state, batch)
            return metrics.gradient_norm, got[-1], loss_and_gradients(state.model, batch)[1]

        reported, clipped, gradients = jax.jit(step)(state, batch)
    assert float(reported) == pytest.approx(length(gradients), rel=1e-5)
    # Each entry is rounded once to the dtype.
    assert length(clipped) == pytest.approx(1e-3, rel=1e-5 if grad_dtype is None else 1e-3)


def length(tree: Any) -> float:
    """In float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def test_no_cast_where_the_dtype_is_there_already() -> None:
    tree = {"a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)}
    assert in_dtype(tree, None) is tree
    assert in_dtype(tree, "float32")["a"] is tree["a"]
    jaxpr = jax.make_jaxpr(lambda tree: in_dtype(tree, "float32"))(tree)
    assert [equation.primitive.name for equation in equations(jaxpr)] == ["convert_element_type"]


@pytest.mark.slow
def test_training_in_bfloat16_follows_float32() -> None:
    """The loss after three steps, near that of float32 gradients."""
    mesh, found = mesh_of("stage=2,fsdp=2"), {}
    for dtype in ("float32", "bfloat16"):
        config = replace(config_of("step", dtype), "train", learning_rate=1e-2)
        with jax.set_mesh(mesh), optax_promotion():
            state = fresh_state(config, mesh)
            batch = jax.tree.map(jnp.asarray, packed_batch(config))
            run = jax.jit(train_step)
            for _ in range(3):
                state, metrics = run(state, batch)
        found[dtype] = float(metrics.loss)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=2e-2)
    assert found["bfloat16"] != found["float32"]


def test_groups_of_experts_stack_gradients_in_the_dtype_of_the_model() -> None:
    """The scan over groups returns one gradient for each; only their stack is cast."""
    x = jnp.ones((2, 4, 8), jnp.bfloat16)
    choice = jnp.ones((2, 4, 1), jnp.bfloat16), jnp.zeros((2, 4, 1), jnp.int32)
    kernels = ExpertKernels(*(jnp.ones(shape) for shape in ((4, 8, 16), (4, 8, 16), (4, 16, 8))))
    layout = Layout()

    def loss(kernels: ExpertKernels) -> jax.Array:
        mixed = DenseExperts(group=2)(x, choice, kernels, layout=layout, remat=FULL).output
        return jnp.sum(mixed.astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(kernels)
    stacked = [
        variable.aval
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        for variable in equation.outvars
        if variable not in carries(equation)
        if math.prod(variable.aval.shape) == kernels.gate.size
    ]
    assert len(stacked) == 3
    assert {aval.dtype for aval in stacked} == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {jnp.dtype("float32")}
