"""The chunked cross-entropy against optax on whole logits, wherever its arrays lie."""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same_placement, largest_array, mesh_of
from jax.sharding import NamedSharding

from nnx_pipeline.experiments._layer_variants import full_cross_entropy
from nnx_pipeline.ops._loss import LossOptions, Targets, chunked_cross_entropy, make_plan
from nnx_pipeline.sharding.layout import Layout

pytestmark = pytest.mark.jax_alone

LAYOUT = Layout()
WHOLE = ("whole_batch",)
EMBED = 8


class Case(NamedTuple):
    """A mesh and the sizes that decide what travels on it."""

    mesh: str
    shape: tuple[int, ...]  # of the tokens, sequence last
    vocab: int
    turned: tuple[str, ...]  # axes along which tokens travel in the place of the kernel's rows
    gathered: tuple[str, ...]  # axes over which the kernel is gathered
    chunks: int = 2
    cap: float | None = None
    mode: str = "explicit"
    whole_on_stages: bool = False  # every stage has all tokens
    zero1: bool = False  # the kernel's rows are sharded over data too

    @property
    def layout(self) -> Layout:
        over = ("data",) if self.zero1 else ()
        return LAYOUT.for_vocabulary(self.vocab, EMBED, over).zero1(over)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        if self.whole_on_stages:
            return ("batch",)
        return ("microbatch", "batch") if len(self.shape) == 3 else ("whole_batch",)


TABLE = [
    Case("", (4, 6), 24, (), ()),
    Case("fsdp=8", (8, 2), 64, ("fsdp",), ()),
    Case("fsdp=8", (16, 16), 64, (), ("fsdp",), mode="auto"),
    Case("fsdp=8", (8, 2), 60, ("fsdp",), ()),  # 60 columns split over 8 devices with zeros
    Case("stage=4,fsdp=2", (8, 2, 8), 16, (), ("fsdp",), chunks=8),
    Case("stage=4,fsdp=2", (4, 2, 2), 64, ("fsdp",), (), mode="auto"),
    Case("stage=2,tensor=2,fsdp=2", (2, 4, 2), 64, ("fsdp",), (), chunks=1),
    Case("data=2,fsdp=2,expert=2", (8, 2), 64, ("fsdp", "expert"), ()),
    Case("data=2,fsdp=2,expert=2", (16, 8), 16, (), ("fsdp", "expert")),
    Case("data=2,stage=2,expert=2", (4, 4, 2), 64, ("expert",), (), mode="auto"),
    Case("stage=4,fsdp=2", (4, 2), 64, ("fsdp",), (), whole_on_stages=True),
    Case("stage=4,fsdp=2", (8, 8), 16, (), ("fsdp",), mode="auto", whole_on_stages=True),
    Case("data=2,stage=2,tensor=2", (4, 2), 16, (), (), whole_on_stages=True),
    Case("tensor=8", (2, 4), 64, (), ()),
    Case("", (4, 6), 24, (), (), cap=1.5),
    Case("fsdp=8", (8, 2), 64, ("fsdp",), (), cap=1.5),
    # The rows are sharded over what the columns do not split over.
    Case("stage=4,fsdp=2", (4, 2, 8), 15, ("stage",), ("fsdp",)),
    Case("stage=4,fsdp=2", (4, 2, 2), 65, ("fsdp", "stage"), (), mode="auto", cap=1.5),
    Case("stage=4,tensor=2", (4, 2), 61, ("stage", "tensor"), (), whole_on_stages=True),
    Case("stage=2,tensor=2,fsdp=2", (4, 8), 9, ("stage", "tensor"), ("fsdp",), mode="auto"),
    Case("stage=2,tensor=2,data=2", (2, 4, 4), 5, ("stage", "tensor"), ("data",), zero1=True),
]


def arrays(case: Case, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """hidden, kernel, targets, weights; a third of the weights is zero."""
    generator = np.random.default_rng(1)
    hidden = generator.normal(size=(*case.shape, EMBED)).astype(dtype)
    kernel = generator.normal(size=(EMBED, case.vocab)).astype(np.float32)
    targets = generator.integers(case.vocab, size=case.shape, dtype=np.int32)
    weights = generator.random(case.shape).astype(np.float32)
    weights[generator.random(case.shape) < 0.3] = 0.0
    return hidden, kernel, targets, weights


def by_optax(
    hidden: Any, kernel: Any, targets: Any, weights: Any, cap: float | None = None
) -> jax.Array:
    logits = (hidden @ kernel.astype(hidden.dtype)).astype(jnp.float32)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def placed(case: Case, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    layout = case.layout
    specs = (
        layout.spec(*case.batch_axes, None, None),
        layout.spec("embed_of_vocab", "vocab"),
        layout.spec(*case.batch_axes, None),
        layout.spec(*case.batch_axes, None),
    )
    pairs = zip(arrays(case), specs, strict=True)
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in pairs]


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_equals_optax(case: Case) -> None:
    """Value, gradients, where they lie, and which of tokens and kernel travels."""
    plainly = jax.jit(jax.value_and_grad(by_optax, (0, 1)), static_argnums=4)
    want = plainly(*map(jnp.asarray, arrays(case)), case.cap)
    mesh = mesh_of(case.mesh, case.mode)
    with jax.set_mesh(mesh):
        layout = case.layout
        plan = make_plan((*case.shape, EMBED), case.vocab, case.batch_axes, case.chunks, layout)
        assert (plan.turned, plan.gathered) == (case.turned, case.gathered)

        def run(hidden: Any, kernel: Any, targets: Any, weights: Any) -> jax.Array:
            return chunked_cross_entropy(
                hidden,
                kernel,
                Targets(targets, weights),
                batch_axes=case.batch_axes,
                options=LossOptions(case.chunks, case.cap),
                layout=layout,
            )

        arguments = placed(case, mesh)
        value, gradients = jax.jit(jax.value_and_grad(run, (0, 1)))(*arguments)
        plain = jax.jit(run)(*arguments)
    assert_close(value, want[0], 1e-5)
    assert_close(plain, want[0], 1e-5)
    assert_close(gradients, want[1], 1e-5)
    assert_same_placement(gradients, tuple(arguments[:2]))


def test_without_a_mesh() -> None:
    case = Case("", (3, 6), 11, (), ())
    arguments = tuple(map(jnp.asarray, arrays(case)))

    def run(*arguments: Any) -> jax.Array:
        hidden, kernel, *targets = arguments
        loss = chunked_cross_entropy(
            hidden,
            kernel,
            Targets(*targets),
            batch_axes=WHOLE,
            options=LossOptions(3),
            layout=LAYOUT,
        )
        return 3.0 * loss + 1.0

    got = jax.value_and_grad(run, (0, 1))(*arguments)
    want = jax.value_and_grad(lambda *args: 3.0 * by_optax(*args) + 1.0, (0, 1))(*arguments)
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("loss", [chunked_cross_entropy, full_cross_entropy])
def test_bfloat16(loss: Any) -> None:
    """The product in bfloat16, everything after it in float32, gradients in the arrays' dtypes."""
    case = Case("", (4, 6), 24, (), ())
    hidden, *others = map(jnp.asarray, arrays(case))
    arguments = (hidden.astype(jnp.bfloat16), *others)

    def run(*arguments: Any) -> jax.Array:
        hidden, kernel, *targets = arguments
        options = LossOptions(2)
        return loss(
            hidden, kernel, Targets(*targets), batch_axes=WHOLE, options=options, layout=LAYOUT
        )

    value, gradients = jax.value_and_grad(run, (0, 1))(*arguments)
    want, want_gradients = jax.value_and_grad(by_optax, (0, 1))(*arguments)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    assert_close(value, want, 1e-3)
    assert_close(gradients, want_gradients, 2e-2)


@pytest.mark.parametrize("loss", [chunked_cross_entropy, full_cross_entropy])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_scale_keeps_small_gradients(dtype: str, loss: Any) -> None:
    """Against float64, with weights as of a small batch and of large ones."""
    case = Case("", (4, 16), 512, (), ())
    hidden, kernel, targets, _ = arrays(case)
    hidden, kernel = (np.asarray(jnp.asarray(each, dtype), np.float64) for each in (hidden, kernel))
    probability = np.exp(hidden @ kernel)
    probability /= probability.sum(axis=-1, keepdims=True)
    d_logits = probability - np.eye(512)[targets]
    want = d_logits @ kernel.T, np.einsum("bsd,bsv->dv", hidden, d_logits)
    for tokens in (2.0**6, 2.0**12, 2.0**18):
        weights = jnp.full(case.shape, 1 / tokens)

        def scaled(hidden: Any, kernel: Any, tokens: Any = tokens, weights: Any = weights) -> Any:
            wanted = Targets(jnp.asarray(targets), weights)
            options = LossOptions(2)
            return tokens * loss(
                hidden, kernel, wanted, batch_axes=WHOLE, options=options, layout=LAYOUT
            )

        given = jnp.asarray(hidden, dtype), jnp.asarray(kernel, jnp.float32)
        found = jax.grad(scaled, (0, 1))(*given)
        for one, exact in zip(found, want, strict=True):
            apart = np.linalg.norm(np.asarray(one, np.float64) - exact)
            assert apart < float(jnp.finfo(dtype).eps) * np.linalg.norm(exact)


def test_large_logits_do_not_overflow() -> None:
    hidden = jnp.full((1, 2, EMBED), 1e3)
    kernel = jnp.stack([jnp.full(EMBED, 1.0), jnp.full(EMBED, -1.0)], axis=1)
    targets = Targets(jnp.array([[0, 1]]), jnp.ones((1, 2)))
    value, gradient = jax.value_and_grad(chunked_cross_entropy)(
        hidden, kernel, targets, batch_axes=WHOLE, options=LossOptions(1), layout=LAYOUT
    )
    assert float(value) == pytest.approx(2 * EMBED * 1e3)
    assert np.all(np.isfinite(gradient))


def test_a_target_outside_the_vocabulary() -> None:
    """Such a target costs log Σ exp alone, as if its logit were zero."""
    case = Case("", (1, 2), 5, (), ())
    hidden, kernel, targets, _ = map(jnp.asarray, arrays(case))
    targets = targets.at[0, 0].set(-1).at[0, 1].set(5)
    wanted = Targets(targets, jnp.ones((1, 2)))
    value = chunked_cross_entropy(
        hidden, kernel, wanted, batch_axes=WHOLE, options=LossOptions(1), layout=LAYOUT
    )
    assert_close(value, jnp.sum(jax.nn.logsumexp(hidden @ kernel, axis=-1)), 1e-6)


def test_full_logits_have_the_soft_cap() -> None:
    """The loss that an experiment compares with the one in chunks."""
    arguments = tuple(map(jnp.asarray, arrays(Case("", (3, 6), 11, (), ()))))

    def run(hidden: Any, kernel: Any, *targets: Any) -> jax.Array:
        options = LossOptions(2, 1.5)
        return full_cross_entropy(
            hidden, kernel, Targets(*targets), batch_axes=WHOLE, options=options, layout=LAYOUT
        )

    want = jax.value_and_grad(functools.partial(by_optax, cap=1.5), (0, 1))(*arguments)
    assert_close(jax.value_and_grad(run, (0, 1))(*arguments), want, 1e-5)


@pytest.mark.parametrize("mesh", [None, "fsdp=8"])
def test_the_logits_never_exist_as_a_whole(mesh: str | None) -> None:
    """No equation makes an array as large as the logits (of one device), forward or backward."""
    shape, vocab, parts = (8, 32), 960 if mesh else 96, 8 if mesh else 1
    case = Case(mesh or "", shape, vocab, (), ())
    logits = shape[0] * shape[1] * vocab // parts

    def largest(loss: Any, chunks: int) -> int:
        def run(hidden: Any, kernel: Any, targets: Any, weights: Any) -> jax.Array:
            wanted = Targets(targets, weights)
            options = LossOptions(chunks)
            return loss(hidden, kernel, wanted, batch_axes=WHOLE, options=options, layout=LAYOUT)

        return largest_array(jax.make_jaxpr(jax.value_and_grad(run, (0, 1)))(*arrays(case)))

    with jax.set_mesh(mesh_of(mesh, "auto")) if mesh else contextlib.nullcontext():
        assert largest(full_cross_entropy, 1) >= logits  # the search finds what is there
        assert largest(chunked_cross_entropy, 1) >= logits
        assert largest(chunked_cross_entropy, 8) < logits // 2
