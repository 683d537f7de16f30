"""The linter: each rule on a bad example and on its good twin, and nothing on the own path."""

import functools
import linecache
import re
from typing import Any

import jax
import jax.numpy as jnp
import lint_examples
import lint_steps
import numpy as np
import pytest
from flax import linen, nnx
from helpers import Run, mesh_of, optax_promotion, replace
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lint_examples import SIZE, X, array, examples, half
from lint_steps import steps

from nnx_pipeline import InputError, preset
from nnx_pipeline.config._remat import POLICIES
from nnx_pipeline.lab._tracing.jaxpr import NOWHERE
from nnx_pipeline.lab.lint import Finding, Limits, lint
from nnx_pipeline.lab.lint._rules_remat import saved_names
from nnx_pipeline.lab.lint._walk import Derivation, JaxprScope
from nnx_pipeline.lab.lint.check import RULES
from nnx_pipeline.train import lint_step

EXAMPLES = {**examples(), **steps()}
each_example = pytest.mark.parametrize("name", EXAMPLES)


def lint_example(name: str, kind: str, **options: Any) -> list[Finding]:
    example = EXAMPLES[name]
    mesh = mesh_of(example.mesh, "auto") if example.mesh else None
    with jax.numpy_dtype_promotion("standard"):  # strict promotion refuses what the rule finds
        arguments = example.arguments
        if kind == "good" and example.instead is not None:
            arguments = example.instead
        return lint(getattr(example, kind), *arguments, mesh=mesh, **options)


def line_of(finding: Finding) -> str:
    return linecache.getline(finding.location.file, finding.location.line).rstrip()


def donated(step: Any) -> Any:
    """The step of a test about something else: its first argument is donated."""
    return jax.jit(step, donate_argnums=0)


@each_example
def test_a_bad_example_gives_one_finding_with_its_line(name: str) -> None:
    (finding,) = lint_example(name, "bad")
    example = EXAMPLES[name]
    assert finding.rule == example.rule
    assert finding.location.file in (lint_examples.__file__, lint_steps.__file__)
    assert finding.location.function == example.where
    assert line_of(finding).endswith("# here")
    assert finding.bytes == example.bytes
    assert finding.what
    assert finding.cure


@each_example
def test_its_good_twin_gives_none(name: str) -> None:
    assert lint_example(name, "good") == []


@each_example
def test_nothing_is_found_below_the_limit(name: str) -> None:
    size = EXAMPLES[name].bytes / RULES[EXAMPLES[name].rule].times
    assert lint_example(name, "bad", limits=Limits(large=size, one_hot=size))
    found = lint_example(name, "bad", limits=Limits(large=size + 1, one_hot=size + 1))
    assert EXAMPLES[name].rule not in {finding.rule for finding in found}


def test_every_rule_has_an_example() -> None:
    from nnx_pipeline.lab._cli.commands import lint_command

    named = re.findall(r"^ *([a-z]+(?:-[a-z]+)+)$", lint_command.help, re.MULTILINE)
    assert {example.rule for example in EXAMPLES.values()} == set(named)


def test_the_limits_of_the_command_are_those_of_the_function() -> None:
    from nnx_pipeline.lab._cli.commands import LimitsInMB, lint_command

    defaults = {option.name: option.default for option in lint_command.params}
    assert LimitsInMB(defaults["large"], defaults["one_hot"]).limits() == Limits()


SMALL = Limits(large=4096, one_hot=65_536)
EIGHT, FOUR = {"num_microbatches": 8}, {"num_microbatches": 4}
OWN_PATHS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("stage=4,fsdp=2", {}),
    ("stage=4,fsdp=2", {**EIGHT, "num_repeats": 2}),
    ("stage=2,fsdp=2,tensor=2", EIGHT),
    ("stage=2,data=2,expert=2", FOUR),
    ("stage=4,fsdp=2", {**EIGHT, "schedule": "1f1b"}),
    ("stage=2,fsdp=2,data=2", {**FOUR, "num_repeats": 2, "fsdp_gather": "prefetch"}),
    ("stage=2,fsdp=2,data=2", {**FOUR, "schedule": "1f1b", "fsdp_gather": "step"}),
    ("stage=4,fsdp=2", {**EIGHT, "shift": "slice", "forwarding_delay": 2}),
]


def own_findings(model: str, mesh: str, limits: Limits, **pipeline: Any) -> list[Finding]:
    config = replace(preset(model), "pipeline", **pipeline)
    with optax_promotion():
        return lint_step(config, mesh_of(mesh, config.pipeline.sharding), limits=limits)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("mesh", "pipeline"), OWN_PATHS)
def test_no_false_alarm_at_tiny(mesh: str, pipeline: dict[str, Any]) -> None:
    """At a limit of 4 KB, a few of its activations."""
    assert own_findings("tiny", mesh, SMALL, **pipeline) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(("mesh", "pipeline"), [OWN_PATHS[2], OWN_PATHS[7]])
def test_no_false_alarm_at_mixtral_small(mesh: str, pipeline: dict[str, Any], mode: str) -> None:
    """At the limits that the command has; in bfloat16 with parameters in float32."""
    assert own_findings("mixtral-small", mesh, Limits(), sharding=mode, **pipeline) == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("remat", ["save_dot_except_mlp", "minimal_offloaded", "none"])
def test_no_false_alarm_for_a_remat_policy(remat: str) -> None:
    options = {"schedule": "1f1b", **EIGHT}
    assert own_findings("tiny", "stage=4,fsdp=2", Limits(), remat=remat, **options) == []


class LinenBlock(linen.Module):
    """bfloat16 over parameters in float32; `norm` and `dense` may be told another dtype."""

    norm: Any = jnp.bfloat16
    dense: Any = jnp.bfloat16

    @linen.compact
    def __call__(self, x: jax.Array, _: None = None) -> Any:
        y = linen.LayerNorm(dtype=self.norm)(x)
        y = linen.RMSNorm(dtype=self.norm)(y)
        return x + linen.gelu(linen.Dense(SIZE, dtype=self.dense)(y)), None


class ForgetfulNorm(LinenBlock):
    norm: Any = None


class ForgetfulDense(LinenBlock):
    dense: Any = None


def linen_step(block: Any, remat: bool, layers: int = 0) -> tuple[Any, Any]:
    """A step of plain gradient descent on blocks one after another, and abstract parameters."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            kind = linen.remat(block) if remat else block
            if not layers:
                return kind()(x)[0]
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return linen.scan(kind, length=layers, **options)()(x, None)[0]

    model, x = Model(), half(512, SIZE)

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(model.apply(params, x).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w + -1e-3 * g, params, jax.grad(loss)(params))

    return jax.jit(step, donate_argnums=0), jax.eval_shape(model.init, jax.random.key(0), x)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("layers", [0, 2], ids=["block", "scan"])
def test_no_false_alarm_on_a_linen_model_in_half(layers: int, remat: bool) -> None:
    """Float32 statistics of a norm, gradients of a cast parameter, and a step size times those."""
    with jax.numpy_dtype_promotion("standard"):
        step, params = linen_step(LinenBlock, remat, layers)
        found = lint(step, params, half(512, SIZE), limits=Limits(large=4096))
    # In a loop the casts of its weights are kept, which is another rule's finding.
    assert [finding for finding in found if not layers or finding.rule == "hidden-upcast"] == []


def test_no_false_alarm_where_a_sum_in_float32_begins() -> None:
    """With a zero that is meant: it says in which dtype what follows is added up."""

    def total(xs: jax.Array) -> jax.Array:
        total = jnp.zeros(xs.shape[1:], jnp.float32)
        for x in xs:
            total = total + x
        return total

    with jax.numpy_dtype_promotion("standard"):
        assert lint(total, half(4, 512, SIZE)) == []


def test_no_false_alarm_on_attention_as_wide_as_its_sequence() -> None:
    """The cotangent of queries has the shape of their kernel then, but its sum is of a bias."""
    layer = linen.MultiHeadDotProductAttention(4)
    x = array(2, 256, 256)
    weights = jax.eval_shape(layer.init, jax.random.key(0), x)
    gradient = jax.grad(lambda weights, x: layer.apply(weights, x, x).sum())
    assert lint(gradient, weights, x, limits=Limits(large=1e5)) == []


def test_no_false_alarm_on_the_gradient_of_attention_in_half() -> None:
    """JAX itself multiplies its float32 cotangent with operands in half."""
    given = [array(2, 256, 4, 64, dtype=jnp.bfloat16)] * 3
    gradient = jax.grad(lambda q, k, v: jax.nn.dot_product_attention(q, k, v).sum())
    with optax_promotion():
        assert lint(gradient, *given, limits=Limits(large=1e5)) == []


def test_a_backward_pass_written_by_hand_is_looked_at_itself() -> None:
    """No line of the forward pass stands for its products, as one does for a transposed one."""
    across = (((0,), (0,)), ((), ()))

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def forward(x: jax.Array, w: jax.Array) -> Any:
        return product(x, w), (x, w)

    def backward(kept: Any, given: jax.Array) -> Any:
        x, w = kept
        wide = given.astype(jnp.float32)
        return given @ w.T, jax.lax.dot_general(x, wide, across).astype(w.dtype)

    product.defvjp(forward, backward)

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return product(x, w).astype(jnp.float32).sum()

    (found,) = lint(jax.grad(total), half(SIZE, SIZE), half(512, SIZE), limits=Limits(large=1e3))
    assert (found.rule, found.bytes) == ("hidden-upcast", 4 * 512 * SIZE)


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("forgotten", ["norm", "dense"])
def test_a_dtype_that_is_forgotten_in_a_linen_model_is_found(forgotten: str, remat: bool) -> None:
    """The layer takes float32 from its parameters, and so does what follows it."""
    block = {"norm": ForgetfulNorm, "dense": ForgetfulDense}[forgotten]
    with jax.numpy_dtype_promotion("standard"):
        step, params = linen_step(block, remat)
        found = lint(step, params, half(512, SIZE))
    assert {finding.rule for finding in found} == {"hidden-upcast"}


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((512, SIZE), lambda w: w),
        ((SIZE, 512), lambda w: w.T),
        ((2, 512, SIZE), lambda w: w[1]),
        ((512, 2 * SIZE), lambda w: w[:, SIZE:]),
        ((512, 8, SIZE // 8), lambda w: w.reshape(512, SIZE)),
    ],
    ids=["a matrix", "its transpose", "one of a stack", "a part", "reshaped"],
)
def test_gradients_side_by_side_are_found_of_every_shape(shape: Any, part: Any) -> None:
    """Whatever the product is made with, what is added up is the gradient of the parameter."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ part(w)) ** 2)

    def by_vmap(w: jax.Array, xs: jax.Array) -> jax.Array:
        return w - jnp.sum(jax.vmap(jax.grad(loss), (None, 0))(w, xs), axis=0)

    def by_scan(w: jax.Array, xs: jax.Array) -> jax.Array:
        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(loss)(w, x), None

        return w - jax.lax.scan(add, jnp.zeros_like(w), xs)[0]

    (found,) = lint(donated(by_vmap), array(*shape), array(4, 64, 512))
    assert (found.rule, found.bytes) == ("gradient-per-microbatch", 4 * 4 * 512 * SIZE)
    assert lint(donated(by_scan), array(*shape), array(4, 64, 512)) == []


def test_a_cotangent_that_is_added_up_is_no_gradient_of_a_parameter() -> None:
    """Keys that all heads share, of as many tokens as the model is wide, look like a weight."""

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        queries = jnp.einsum("sd,dhk->hsk", x, weights["query"])
        keys = x @ weights["key"]
        scores = jax.nn.softmax(jnp.einsum("hsk,tk->hst", queries, keys))
        return jnp.mean(jnp.einsum("hst,tk->shk", scores, keys) ** 2)

    weights = {"query": array(SIZE, 4, 128), "key": array(SIZE, 128)}
    found = lint(jax.grad(loss), weights, array(SIZE, SIZE), limits=Limits(large=1e3))
    assert {finding.rule for finding in found} == {"scores-stored"}


@pytest.mark.parametrize("scaled_first", [False, True])
def test_a_cotangent_with_several_readers_is_no_gradient(scaled_first: bool) -> None:
    """One reader makes the gradient of the scale, the other is multiplied again."""

    def loss(weights: dict[str, jax.Array], x: jax.Array, shares: jax.Array) -> jax.Array:
        made = weights["made"] @ weights["of"]
        scale = weights["scale"]
        kernel = scale * made if scaled_first else made * scale
        each = kernel[None] * shares[:, None, None]
        return jnp.sum(jnp.einsum("mnd,mdf->mnf", x, each) ** 2)

    weights = {name: array(SIZE, SIZE) for name in ("made", "of", "scale")}
    x, shares = array(4, 8, SIZE), array(4)
    assert lint(jax.grad(loss), weights, x, shares, limits=Limits(large=1e3)) == []


def test_gradients_of_one_parameter_that_look_like_another_are_found() -> None:
    def step(weights: tuple[jax.Array, jax.Array], xs: jax.Array) -> jax.Array:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.mean((x @ w) ** 2)

        return jax.lax.map(lambda x: jax.grad(loss)(weights[0], x), xs).sum(axis=0)

    weights = array(512, SIZE), array(4, SIZE, 512)
    (found,) = lint(step, weights, array(4, 64, 512))
    assert (found.rule, found.bytes) == ("gradient-per-microbatch", 4 * 4 * 512 * SIZE)


def test_what_returns_nothing_is_walked_past() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        wide = (x @ w) * jnp.float32(2)
        jax.debug.print("{}", wide)
        return jnp.mean(wide**2)

    def by_vmap(w: jax.Array, xs: jax.Array) -> jax.Array:
        gradients = jax.vmap(jax.grad(loss), (None, 0))(w, xs)
        jax.debug.print("{}", gradients)
        return w - jnp.sum(gradients, axis=0).astype(w.dtype)

    with jax.numpy_dtype_promotion("standard"):
        found = lint(donated(by_vmap), half(512, SIZE), half(4, 64, 512), limits=Limits(large=1e3))
    assert {one.rule for one in found} == {"hidden-upcast", "gradient-per-microbatch"}


def test_a_constant_is_found_in_the_gradient_too() -> None:
    """The cast back that the backward pass ends with is not the function's own."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(((x @ w) / np.float32(8)) ** 2)  # here

    with jax.numpy_dtype_promotion("standard"):
        for function in (loss, jax.grad(loss), jax.value_and_grad(loss)):
            (found,) = lint(function, half(SIZE, SIZE), half(512, SIZE), limits=Limits(large=1e3))
            assert (found.rule, found.bytes) == ("hidden-upcast", 4 * 512 * SIZE)


def test_a_scale_beside_a_statistic_is_found() -> None:
    """A mean of the array is let pass, times a float32 parameter it is not."""

    def scaled(scale: jax.Array, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x.astype(jnp.float32), axis=-1, keepdims=True)
        return (x - mean * scale).astype(x.dtype)  # here

    with jax.numpy_dtype_promotion("standard"):
        (finding,) = lint(scaled, array(1), half(512, SIZE))
        assert line_of(finding).endswith("# here")
        assert lint(functools.partial(scaled, 2.0), half(512, SIZE)) == []


def test_a_policy_that_the_names_escape_is_found_in_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stages of this project's own pipeline, under a policy whose names no module gives."""
    from nnx_pipeline.config._remat import Remat

    monkeypatch.setitem(POLICIES, "save_out_proj", Remat(("outproj",)))
    monkeypatch.setattr("nnx_pipeline.pipeline.stage.layers.named", lambda x, name: x)
    (finding,) = own_findings("tiny", "stage=4,fsdp=2", Limits(), remat="save_out_proj", **EIGHT)
    assert finding.rule == "remat-policy"
    assert "the policy saves " in finding.cure
    assert "outproj" in finding.cure


def test_bytes_are_of_one_device_in_explicit_mode() -> None:
    mesh = mesh_of("data=8", "explicit")
    scale = array(SIZE)
    x = jax.ShapeDtypeStruct((512, SIZE), "bfloat16", sharding=NamedSharding(mesh, P("data")))
    with jax.numpy_dtype_promotion("standard"):
        (finding,) = lint(lint_examples.scaled, scale, x, mesh=mesh, limits=Limits(large=1e5))
    assert (finding.bytes, finding.per_device) == (512 * SIZE * 4 // 8, True)


def test_a_mesh_needs_no_devices_and_has_the_axes_of_the_arguments() -> None:
    mesh = AbstractMesh((64,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((512, SIZE), "bfloat16", sharding=NamedSharding(mesh, P("data")))
    with jax.numpy_dtype_promotion("standard"):
        found = lint(lint_examples.scaled, array(SIZE), x, mesh=mesh, limits=Limits(large=1e3))
    assert [(one.bytes, one.per_device) for one in found] == [(512 * SIZE * 4 // 64, True)]
    with pytest.raises(InputError, match="over data=64, and the mesh has data=8; give both the"):
        lint(lint_examples.scaled, array(SIZE), x, mesh=mesh_of("data=8"))
    with pytest.raises(InputError, match="over the mesh axis 'data', and the mesh has other; name"):
        lint(lint_examples.scaled, array(SIZE), x, mesh=AbstractMesh((8,), ("other",)))


@pytest.mark.parametrize("spread", [True, False])
def test_bytes_in_auto_mode_say_whose_they_are(spread: bool) -> None:
    """Of one device for what comes from an argument with a sharding, else of all."""
    mesh = mesh_of("data=8", "auto")
    sharding = NamedSharding(mesh, P("data")) if spread else None
    x = jax.ShapeDtypeStruct((512, SIZE), "bfloat16", sharding=sharding)
    with jax.numpy_dtype_promotion("standard"):
        (finding,) = lint(lint_examples.scaled, array(SIZE), x, mesh=mesh, limits=Limits(large=1e5))
    parts = 8 if spread else 1
    assert (finding.bytes, finding.per_device) == (512 * SIZE * 4 // parts, spread)


def test_in_explicit_mode_a_reshard_is_a_gather() -> None:
    mesh = mesh_of("fsdp=8", "explicit")
    sharding = NamedSharding(mesh, P("fsdp"))
    w = jax.ShapeDtypeStruct((SIZE, SIZE), "float32", sharding=sharding)
    whole = functools.partial(jax.sharding.reshard, out_shardings=P())

    def twice(w: jax.Array, x: jax.Array) -> jax.Array:
        first = jnp.tanh(x @ whole(w))
        return first @ whole(w.astype(jnp.bfloat16)).astype(x.dtype)  # here

    def once(w: jax.Array, x: jax.Array) -> jax.Array:
        gathered = whole(w)
        return jnp.tanh(x @ gathered) @ gathered

    (found,) = lint(twice, w, w, mesh=mesh)
    assert (found.rule, found.bytes, found.per_device) == ("gathered-twice", 2 * SIZE**2, True)
    assert line_of(found).endswith("# here")
    assert lint(once, w, w, mesh=mesh) == []


@pytest.mark.parametrize("spec", [P(), P("fsdp")])
def test_a_donation_is_lost_by_the_sharding_that_the_jit_declares(spec: P) -> None:
    mesh = mesh_of("fsdp=8", "auto")
    sharding = NamedSharding(mesh, P("fsdp"))
    w = jax.ShapeDtypeStruct((4 * SIZE, SIZE), "float32", sharding=sharding)

    def decayed(w: jax.Array) -> jax.Array:
        return w * 0.9

    declared = jax.jit(decayed, donate_argnums=0, out_shardings=NamedSharding(mesh, spec))
    found = [(one.rule, one.bytes) for one in lint(declared, w, mesh=mesh)]
    assert found == ([] if spec else [("donation-lost", 2 * SIZE**2)])


def test_a_cure_names_the_arguments_and_the_jit() -> None:
    """What is to be typed: by number or name, as the function's own jit takes it."""

    def update(w: jax.Array, rate: jax.Array, *, cache: jax.Array) -> Any:
        return w, cache.at[0].set(rate)

    arguments = array(SIZE, SIZE), array(), array(SIZE, SIZE)
    (plain,) = lint(update, *arguments)
    assert plain.cure.startswith(
        "jit it with donation: jax.jit(update, donate_argnames=('cache',))"
    )
    (jitted,) = lint(jax.jit(update), *arguments)
    assert "write jax.jit(…, donate_argnames=('cache',))" in jitted.cure
    model, optimizer = nnx.eval_shape(lint_steps.nnx_state)
    (found,) = lint(nnx.jit(lint_steps.nnx_update), model, optimizer, array(8, SIZE))
    assert "nnx.jit(…, donate_argnums=(0, 1) or" in found.cure
    assert "donate_argnames=('model', 'optimizer'))" in found.cure


def test_no_false_alarm_on_a_residual_layer() -> None:
    """Its result is its argument and something more, but no new state."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w)

    given = array(SIZE, SIZE), array(SIZE, SIZE)
    assert lint(layer, *given) == lint(jax.grad(lambda *a: layer(*a).sum(), (0, 1)), *given) == []


def test_logits_and_routers_in_float32_are_meant() -> None:
    """A layer that is told float32, in a model in half, for what a softmax is taken of."""
    head = linen.Dense(SIZE, dtype=jnp.float32, use_bias=False)
    params = {"params": {"kernel": array(SIZE, SIZE)}}

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(head.apply(params, x))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=-1))

    with jax.numpy_dtype_promotion("standard"):
        labels = array(512, dtype=jnp.int32)
        assert lint(jax.grad(loss), params, half(512, SIZE), labels) == []


def test_each_call_of_what_jax_jits_has_its_own_line() -> None:
    """JAX traces `jax.nn.one_hot` once for both; the line is that of the call."""

    def twice(table: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        first = jax.nn.one_hot(a, table.shape[0]) @ table  # first
        return first + jax.nn.one_hot(b, table.shape[0]) @ table  # second

    table, tokens = EXAMPLES["one-hot"].arguments
    found = lint(twice, table, tokens, tokens)
    assert sorted(line_of(finding).split("# ")[1] for finding in found) == ["first", "second"]


def test_one_line_is_one_finding() -> None:
    """A helper called from two lines is two, told apart by the caller."""

    def scale(x: jax.Array, by: jax.Array) -> jax.Array:
        return x * by

    def loss(by: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            a = scale(x, by)
        return jnp.sum(a) + jnp.sum(scale(x, by))

    with jax.numpy_dtype_promotion("standard"):
        found = lint(loss, array(SIZE), half(512, SIZE))
    assert [finding.location.function for finding in found] == ["scale", "scale"]
    assert {finding.location.caller.split(" ")[-1] for finding in found} == {"(loss)"}
    assert sorted(finding.times for finding in found) == [1, 3]
    with jax.numpy_dtype_promotion("standard"):
        (direct,) = lint(scale, half(512, SIZE), array(SIZE))
    assert not re.search(r"nnx_pipeline/(lint|tracing)/", direct.location.caller)


def test_parameters_are_the_params_of_a_module() -> None:
    """Other variables of the first argument are none, and any argument can be named one."""

    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.BatchStat(jnp.zeros((SIZE, SIZE)))

    def apply(model: Counted, x: jax.Array) -> jax.Array:
        return lint_examples.carried(model.w[...], x)

    model = nnx.eval_shape(Counted)
    assert lint(apply, model, X) == []
    (finding,) = lint(apply, model, X, parameters=model)
    assert finding.rule == "parameter-in-loop"
    swapped = functools.partial(lambda x, w: lint_examples.carried(w, x))
    w = array(SIZE, SIZE)
    assert lint(swapped, X, w) == []
    assert lint(swapped, X, w, parameters=w)


def test_a_loop_of_one_value_has_a_condition_of_its_own() -> None:
    """Its condition gives one value too, and must not be taken for the body."""

    def run(x: jax.Array, limit: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.all(x < limit), lambda x: x * scale, x)

    jaxpr = jax.make_jaxpr(run)(*(jnp.ones(4),) * 3).jaxpr
    scope = JaxprScope(jaxpr)
    (loop,) = jaxpr.eqns
    condition, body = scope.inner[id(loop)]
    limit, scale = (scope.value(variable) for variable in jaxpr.invars[1:])
    assert condition.inlets[condition.jaxpr.invars[0]] == Derivation("same", (limit,))
    assert condition.jaxpr.invars[1] not in condition.inlets  # what it carries is not known
    assert body.inlets[body.jaxpr.invars[0]] == Derivation("same", (scale,))
    assert body.inlets[body.jaxpr.invars[1]].way == "carry"


def test_a_value_is_followed_through_an_own_rule_of_vmap_and_a_layout() -> None:
    @custom_vmap
    def placed(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout((1, 0)))

    @placed.def_vmap
    def _(size: int, mapped: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        return x, True

    def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
        chosen = placed(ids[:, None] == jnp.arange(table.shape[0]))
        return chosen.astype(table.dtype) @ table

    (found,) = lint(looked_up, *EXAMPLES["one-hot"].arguments)
    assert found.rule == "one-hot"


def test_a_one_hot_array_of_which_sums_are_taken_is_not_stored() -> None:
    def counts(ids: jax.Array, scores: jax.Array) -> Any:
        chosen = jax.nn.one_hot(ids, scores.shape[-1], dtype=scores.dtype)
        return jnp.sum(chosen, axis=-2), jnp.sum(chosen * scores[:, None], axis=-1)

    given = array(2**18, 8, dtype=jnp.int32), array(2**18, 256)
    assert lint(counts, *given) == []


def test_a_loop_of_one_iteration_keeps_no_more_than_its_entry() -> None:
    given = array(1, SIZE, SIZE), half(512, SIZE)
    assert lint(lint_examples.stacked, *given) == []


def test_a_gather_before_two_loops_is_reported_where_it_is_large() -> None:
    """It is made once for all iterations of the outer loop, which may be meant."""
    mesh = mesh_of(lint_steps.FSDP, "auto")
    stack = lint_steps.on(P(None, "fsdp"), 16, SIZE, SIZE)
    given = stack, lint_steps.on(P(None, "fsdp"), 3, lint_steps.ROWS, SIZE)
    (found,) = lint(lint_steps.turns(lint_steps.gather_stack), *given, mesh=mesh)
    assert (found.rule, found.bytes) == ("layers-gathered", 16 * 4 * SIZE**2)
    assert "again in each iteration" in found.cure
    assert (
        lint(lint_steps.turns(lint_steps.gather_stack), *given, mesh=mesh, limits=Limits(large=4e6))
        == []
    )
    assert lint(lint_steps.turns(lambda weights: weights), *given, mesh=mesh) == []


def test_findings_come_largest_first() -> None:
    def both(w: jax.Array, x: jax.Array) -> Any:
        small = lint_examples.carried(w[:512, :512], x[:, :512])
        return small, lint_examples.carried(w, x)

    found = lint(both, array(SIZE, SIZE), X)
    assert [finding.bytes for finding in found] == [4 * SIZE**2, SIZE**2]


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (jax.checkpoint_policies.save_only_these_names("a", "b"), {"a", "b"}),
        (jax.checkpoint_policies.save_only_these_names(), set()),
        (jax.checkpoint_policies.dots_saveable, None),
        (
            jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            {"a", "b"},
        ),
    ],
)
def test_the_names_of_a_policy(policy: Any, names: set[str] | None) -> None:
    """JAX has no public way to ask; this reads the closure or the fields of the policy."""
    assert saved_names(policy) == names


def test_what_is_read_of_source_info() -> None:
    """Not documented by JAX: the traceback and the name stack of an equation, and two names in it.

    Everything that depends on them is in nnx_pipeline/lab/_tracing/jaxpr.py.
    """
    checkpointed = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    program = jax.make_jaxpr(jax.grad(checkpointed))(1.0)
    (backward,) = (e for e in program.eqns if "jaxpr" in e.params)
    again = [e.source_info for e in backward.params["jaxpr"].eqns if e.primitive.name == "sin"]
    assert "rematted_computation" in str(again[0].name_stack)
    cast = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.sin(x).astype("bfloat16"))))(jnp.ones(3))
    turned = [e for e in cast.eqns if e.primitive.name == "convert_element_type"][-1]
    assert "transpose(" in str(turned.source_info.name_stack)
    assert again[0].traceback.as_python_traceback().tb_frame is not None
    assert str(NOWHERE) == "unknown"


@pytest.mark.parametrize("option", ["--large", "--one-hot"])
@pytest.mark.parametrize("size", ["nan", "inf"])
def test_a_limit_that_is_no_size(run: Run, option: str, size: str) -> None:
    ended = run("lint", "--model", "tiny", option, size)
    assert ended.code == 2
    assert f"{option} {size} is not a valid size in MB; give one" in ended.err


@pytest.mark.parametrize("field", ["large", "one_hot"])
def test_a_limit_is_a_number_of_0_or_more(field: str) -> None:
    with pytest.raises(InputError, match=rf"{field}=-1 is out of range; choose 0 or more"):
        Limits(**{field: -1})


def test_what_a_target_follows_is_not_donated() -> None:
    """Of two networks the one that comes back, and none where its decay alone is in the result."""
    w = {"up": array(SIZE, SIZE)}

    def followed(online: Any, target: Any) -> Any:
        return jax.tree.map(lambda t, o: 0.995 * t + 0.005 * o, target, online)

    def trained(online: Any, target: Any, x: Any) -> Any:
        loss = jax.grad(lambda online: jnp.sum(x @ online["up"]) ** 2)(online)
        return followed(online, target), jnp.sum(loss["up"])

    def gradient(params: Any, x: Any) -> Any:
        found = jax.grad(lambda params: jnp.sum(x @ params["up"]) ** 2)(params)
        return jax.tree.map(lambda d, w: d + 1e-4 * w, found, params)

    small = Limits(large=1)
    (finding,) = _not_donated(lint(trained, w, w, array(8, SIZE), limits=small))
    assert "donate_argnums=(1,)" in finding.cure
    assert not _not_donated(lint(gradient, w, array(8, SIZE), limits=small))


class _Own(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((SIZE, SIZE)))


def test_the_jit_that_can_donate_is_named() -> None:
    def step(model: _Own, x: Any) -> Any:
        gradients = nnx.grad(lambda model: jnp.sum(x @ model.w[...]) ** 2)(model)
        nnx.update(model, jax.tree.map(lambda w, d: w - 0.1 * d, nnx.state(model), gradients))

    found = lint(step, nnx.eval_shape(_Own), array(8, SIZE), limits=Limits(large=1))
    (finding,) = _not_donated(found)
    assert finding.cure.startswith("jit it with donation: nnx.jit(step, donate_argnums=(0,)")


def _not_donated(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.rule == "not-donated"]
