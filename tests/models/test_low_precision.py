"""Products in 8 bits: their values and gradients, that they are there, and what is refused."""

import collections
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import (
    assert_close,
    equations,
    float_rows,
    fresh_model,
    mesh_of,
    missing,
    packed_batch,
    replace,
    small_config,
)
from jax.sharding import NamedSharding

from linen_compat import modules as linen
from nnx_pipeline import Config, InputError
from nnx_pipeline.experiments import floor
from nnx_pipeline.ops._low_precision import PRECISIONS, product_of, quantized_product
from nnx_pipeline.sharding.layout import Layout, P
from nnx_pipeline.train import loss_and_gradients
from nnx_pipeline.train.step import batch_sharding

QWIX = pytest.mark.skipif(missing("qwix"), reason="qwix is not installed")
DENSE = {"num_experts": 1, "num_experts_per_token": 1}
PRODUCTS = 7  # of a layer: four projections of attention and three of the MLP
# What the largest value of an array becomes: for integers the end of the last bucket.
LARGEST = {"int8": 127.5, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def config_of(kind: str | None, **pipeline: Any) -> Config:
    return small_config(model={**DENSE, "quantization": kind}, pipeline=pipeline)


def operands(function: Any, *arguments: Any) -> collections.Counter[tuple[str, ...]]:
    """How many products a program has of each pair of dtypes."""
    return collections.Counter(
        tuple(str(operand.aval.dtype) for operand in equation.invars)
        for equation in equations(jax.make_jaxpr(function)(*arguments))
        if equation.primitive.name == "dot_general"
    )


def rounded(x: jax.Array, axes: tuple[int, ...], dtype: str) -> jax.Array:
    """The values that `x` has in 8 bits with one scale for all of the given axes."""
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST[dtype]
    if dtype == "int8":
        return scale * jnp.clip(jnp.round(x / scale), -128, 127)
    return scale * (x / scale).astype(dtype).astype(jnp.float32)


@QWIX
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_product_is_one_of_rounded_operands(kind: str) -> None:
    x, kernel = float_rows(2, 3, 8), float_rows(8, 2, 4, seed=1)
    values, cotangents = PRECISIONS[kind]

    def plain(x: Any, kernel: Any, d_result: Any) -> Any:
        result = jnp.einsum(
            "bsd,dhk->bshk", rounded(x, (2,), values), rounded(kernel, (0,), values)
        )
        d_x = jnp.einsum(
            "bshk,dhk->bsd", rounded(d_result, (2, 3), cotangents), rounded(kernel, (1, 2), values)
        )
        return result, d_x, jnp.einsum("bsd,bshk->dhk", x, d_result)

    def product(x: Any, kernel: Any) -> Any:
        return quantized_product(PRECISIONS[kind], "bsd,dhk->bshk", x, kernel, P())

    result, pull_back = jax.vjp(product, x, kernel)
    d_result = jnp.cos(result)
    assert_close((result, *pull_back(d_result)), plain(x, kernel, d_result), 1e-5)


@QWIX
@pytest.mark.parametrize("kind", PRECISIONS)
def test_the_products_of_a_layer_are_in_8_bits(kind: str) -> None:
    """Each projection forward and for the gradient of its input; nothing is computed again."""
    config = replace(config_of(kind, remat="none"), "model", num_layers=1)
    mesh, batch = mesh_of(""), packed_batch(config)
    model = fresh_model(config, mesh)
    values, cotangents = PRECISIONS[kind]
    with jax.set_mesh(mesh):
        found = operands(loss_and_gradients, model, batch, None)
    low = {pair: count for pair, count in found.items() if pair != ("float32", "float32")}
    wanted = collections.Counter({(values, values): PRODUCTS})
    assert low == wanted + collections.Counter({(cotangents, values): PRODUCTS})


@pytest.mark.slow
@QWIX
def test_linen_modules_compute_the_same() -> None:
    model = config_of("int8").model
    layer, x = linen.LlamaDecoderLayer(model), float_rows(1, 8, 16)
    parameters = layer.init(jax.random.key(0), x)
    assert operands(layer.apply, parameters, x)["int8", "int8"] == PRODUCTS


@QWIX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "mode", "options"),
    [
        ("fsdp=2,tensor=2,data=2", "explicit", {}),
        ("stage=2,fsdp=2,tensor=2", "explicit", {"fsdp_gather": "prefetch"}),
        ("stage=2,tensor=2,fsdp=2", "auto", {}),
        ("stage=2,fsdp=2", "explicit", {"schedule": "1f1b"}),
    ],
)
def test_a_mesh_changes_nothing(mesh: str, mode: str, options: dict[str, Any]) -> None:
    """Up to rounding: a sum in another order may round an operand to a neighbour, 1/127 away.

    What is computed from that operand may then be rounded to neighbours too. A product of the same
    operands is the same on every mesh, see below.
    """

    def results(kind: str | None, text: str, mode: str, options: dict[str, Any]) -> Any:
        config = config_of(kind, sharding=mode, **options)
        grid = mesh_of(text, mode)
        model = fresh_model(config, grid)
        with jax.set_mesh(grid):
            batch = jax.tree.map(
                lambda x: jax.device_put(jnp.asarray(x), batch_sharding(grid, model.layout)),
                packed_batch(config),
            )
            (loss, _), gradients = jax.jit(loss_and_gradients)(model, batch, None)
        return loss, gradients.norm.scale.get_value(), gradients.head.get_value()

    alone, apart = results("int8", "", "explicit", {}), results("int8", mesh, mode, options)
    full = results(None, "", "explicit", {})
    assert_close(apart[0], alone[0], 1e-3)
    assert_close(apart[1:], alone[1:], 2e-2)
    assert abs(float(full[0] - alone[0])) > 1e-5, "rounding to 8 bits is seen in the loss"


@QWIX
@pytest.mark.parametrize("mode", ["explicit", "auto"])
@pytest.mark.parametrize(
    ("equation", "shapes", "names"),
    [
        (
            "bsd,dhk->bshk",
            ((4, 3, 8), (8, 2, 4)),
            (("batch", None, None), (None, "heads", None), ("batch", None, "heads", None)),
        ),
        (
            "bshk,hkd->bsd",  # the sum runs over an axis that is sharded
            ((4, 3, 2, 4), (2, 4, 8)),
            (("batch", None, "heads", None), ("heads", None, None), ("batch", None, None)),
        ),
    ],
)
def test_a_product_on_a_mesh(equation: str, shapes: Any, names: Any, mode: str) -> None:
    x, kernel = (float_rows(*shape, seed=seed) for seed, shape in enumerate(shapes))

    def with_gradients(out: P, x: Any, kernel: Any) -> Any:
        def product(x: Any, kernel: Any) -> Any:
            return quantized_product(PRECISIONS["int8"], equation, x, kernel, out)

        result, pull_back = jax.vjp(product, x, kernel)
        return result, *pull_back(result)

    alone = with_gradients(P(), x, kernel)
    mesh = mesh_of("fsdp=2,tensor=2", mode)
    with jax.set_mesh(mesh):
        specs = [Layout().spec(*each) for each in names]
        placed = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in zip((x, kernel), specs, strict=False)
        ]
        found = jax.jit(functools.partial(with_gradients, specs[-1]))(*placed)
    assert_close(found, alone, 1e-6)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"'fp8' needs Qwix, .*pip install 'nnx-pipeline\[quant"):
        product_of(config_of("fp8").model)


def test_the_floor_gives_no_bound() -> None:
    found = floor(config_of("int8"), "fsdp=2", "tpu:v5p:2x1x1")
    assert found.unknown == ("what model.quantization=int8 holds is not counted",)
    assert found.time is None
