"""Weights that a loop reads slice by slice, in the order in which they are stored."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, float_rows, mesh_of, missing, optax_promotion

from nnx_pipeline import Layout, MeshConfig, preset
from nnx_pipeline.config._overrides import apply_overrides
from nnx_pipeline.experiments._programs import measure_step
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.ops import _experts, _loss
from nnx_pipeline.ops._loss import LossOptions, Targets, chunked_cross_entropy
from nnx_pipeline.sharding import _cast
from nnx_pipeline.sharding._cast import reading_slices, slices_in_stored_order
from nnx_pipeline.sharding.layout import P

pytestmark = pytest.mark.jax_alone

STAGES, LAYERS, WIDTH = 2, 3, 8


def layers(x: Any, kernels: Any, *, once: bool = False, read: Any = "each tick") -> Any:
    """Layers of each stage, one after the other: `[stages, rows, width]`."""

    def layer(x: Any, kernel: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ slices_in_stored_order(kernel, read=read)), None

    def stage(x: Any, kernels: Any) -> Any:
        with reading_slices(once=once):
            return jax.lax.scan(layer, x, kernels)[0]

    return jax.vmap(stage)(x, kernels)


@pytest.mark.parametrize("mesh", ["", "stage=2,fsdp=2"])
def test_values_and_derivatives_are_those_without_an_order(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, kernels = float_rows(STAGES, 4, WIDTH), float_rows(STAGES, LAYERS, WIDTH, WIDTH, seed=1)

    def loss(x: Any, kernels: Any) -> Any:
        return jnp.sum(jnp.square(layers(x, kernels)))

    def derivatives(*args: Any) -> Any:
        return jax.value_and_grad(loss, (0, 1))(*args), jax.jvp(loss, args, args)[1]

    wanted = jax.jit(derivatives)(x, kernels)
    monkeypatch.setattr(_cast, "ambient_platform", lambda: "tpu")
    with jax.set_mesh(mesh_of(mesh, "explicit")):
        args = (
            (jax.device_put(x, P("stage")), jax.device_put(kernels, P("stage")))
            if mesh
            else (x, kernels)
        )
        assert_close(jax.jit(lambda *args: derivatives(*args))(*args), wanted, 1e-5)
        assert str(jax.make_jaxpr(layers)(*args)).count("layout_constraint") == 1
        for once, read in ((True, "once"), (True, "each tick"), (False, "once")):
            seldom = functools.partial(layers, once=once, read=read)
            found = str(jax.make_jaxpr(seldom)(*args)).count("layout_constraint")
            assert found == (once and read == "once")


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_the_gradient_of_a_large_head(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, kernel = float_rows(8, 2, WIDTH), float_rows(WIDTH, 64, seed=1)
    targets = Targets(jnp.arange(16, dtype=jnp.int32).reshape(8, 2), jnp.ones((8, 2)))
    options = LossOptions(chunks=2)

    def gradients(hidden: Any, kernel: Any, targets: Any) -> Any:
        def loss(hidden: Any, kernel: Any) -> Any:
            of_batch = {"batch_axes": ("whole_batch",), "layout": Layout()}
            return chunked_cross_entropy(hidden, kernel, targets, options=options, **of_batch)

        return jax.value_and_grad(loss, (0, 1))(hidden, kernel)

    wanted = gradients(hidden, kernel, targets)
    monkeypatch.setattr(_cast, "ambient_platform", lambda: "tpu")
    monkeypatch.setattr(_loss, "LARGE_HEAD", 0)
    with jax.set_mesh(mesh_of("fsdp=8", mode)):
        args = jax.device_put((hidden, kernel, targets), P("fsdp"))
        assert_close(jax.jit(gradients)(*args), wanted, 1e-5)
        assert str(jax.make_jaxpr(gradients)(*args)).count("layout_constraint") == 1


DEEP = {
    "model.num_layers": "10",
    "pipeline.num_microbatches": "4",
    "pipeline.schedule": "1f1b",
    "train.global_batch": "8",
}


@pytest.mark.parametrize("held", [True, False])
def test_no_stack_of_kernels_is_copied_for_a_loop_over_layers(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five layers per stage, of which the compiler for TPU else copies the kernels of a product."""
    if missing("libtpu"):
        pytest.skip("libtpu is not installed")
    if not held:
        monkeypatch.setattr(_experts, "slices_in_stored_order", lambda kernel, read: kernel)
    config = apply_overrides(preset("mixtral-small"), DEEP)
    with optax_promotion():
        found = measure_step(
            config, MeshConfig.parse("stage=2,fsdp=2"), Platform.parse("tpu:v5p:2x2x1")
        )
    assert found.attribution is not None
    copies = found.attribution.by_role().get("parameter copy", 0)
    one = 4 * config.model.embed_dim * config.model.mlp_dim * config.model.num_experts
    assert (copies < one) == held
