"""What the wrappers cannot use is refused with the rule, the value and the cure."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from helpers import small_config

import linen_compat
from linen_compat import to_linen, to_nnx
from nnx_pipeline import InputError, RMSNorm

CONFIG = small_config().model
X = jnp.ones((2, CONFIG.embed_dim))
NORM = linen_compat.RMSNorm(CONFIG)


def native() -> RMSNorm:
    return RMSNorm(CONFIG, rngs=nnx.Rngs(0))


class Pair(nnx.Module):
    def __init__(self) -> None:
        self.pair = nnx.Param((jnp.ones(2), jnp.ones(3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_linen(native()), "got an object of RMSNorm; give the class and its arguments"),
        (lambda: to_linen(linen_compat.RMSNorm, CONFIG), "RMSNorm is already a Linen module; use"),
        (lambda: to_linen(NORM), "RMSNorm is already a Linen module; use it as it is"),
        (lambda: to_linen(lambda: 3), "takes a class of nnx.Module and got an object of function"),
        (lambda: to_linen(dict), "got the class dict; give a class and its arguments, such as"),
        (
            lambda: to_linen(RMSNorm),
            "the constructor of RMSNorm does not take these arguments: missing a",
        ),
        (lambda: to_linen(RMSNorm, CONFIG, size=3), "unexpected keyword argument 'size'; give"),
        (lambda: to_linen(RMSNorm, CONFIG, rngs=nnx.Rngs(0)), "got rngs=Rngs, .* leave it out"),
        (lambda: to_nnx(linen_compat.RMSNorm, X, rngs=0), r"the class RMSNorm; make one first, to"),
        (
            lambda: to_nnx(native(), X, rngs=0),
            "an object of RMSNorm; RMSNorm is already an NNX module",
        ),
        (
            lambda: to_nnx(RMSNorm, X, rngs=0),
            "got the class RMSNorm; RMSNorm is already an NNX module",
        ),
        (
            lambda: to_nnx(3, X, rngs=0),
            "to_nnx takes a Linen module and got 3; give a Linen module",
        ),
        (
            lambda: to_nnx(NORM, rngs=0),
            "RMSNorm does not take these arguments: missing a required argument",
        ),
        (
            lambda: to_nnx(NORM, X, rngs=0.5),
            r"rngs=0.5 is not a key, .* give rngs=nnx.Rngs\(params=0",
        ),
        (
            lambda: to_nnx(NORM, X, rngs=True),
            r"rngs=True is not a key, a seed or an nnx.Rngs; give",
        ),
        (
            lambda: to_nnx(NORM, X, rngs={"params": jax.random.key(0)}),
            r"is not a key, a seed or an nnx.Rngs; give rngs=nnx.Rngs\(params=…\)",
        ),
        (
            lambda: to_nnx(NORM, X, rngs=0, collect="intermediates"),
            r"collect='intermediates' is a single string; give a tuple, "
            r"collect=\('intermediates',\)",
        ),
        (lambda: to_nnx(NORM, X, variables=5), r"variables=5 is not a tree of collections; give"),
        (
            lambda: to_nnx(NORM, X, variables={"params": {"scale": None}}),
            r"params/scale has shape None and RMSNorm needs",
        ),
        (
            lambda: to_linen(Pair),
            r"Pair.pair holds a tuple and not an array; give each array a variable of its own",
        ),
        (lambda: to_nnx(NORM, X, rngs=0)(X, method="nope"), "RMSNorm has no method 'nope'; "),
    ],
)
def test_misuse_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_method_that_there_is_not() -> None:
    module = to_linen(RMSNorm, CONFIG)
    variables = module.init(jax.random.key(0), X)
    with pytest.raises(InputError, match="RMSNorm has no method 'nope'; choose one of"):
        module.apply(variables, X, nnx_method="nope")
    with pytest.raises(InputError, match="RMSNorm has no method 'nope'; choose one of"):
        module.init(jax.random.key(0), X, nnx_method="nope")


def test_init_without_a_key_for_the_parameters() -> None:
    message = re.escape("RMSNorm draws random numbers from the stream 'params' and got no key")
    with pytest.raises(InputError, match=message):
        to_linen(RMSNorm, CONFIG).init({"dropout": jax.random.key(0)}, X)


def test_keys_and_seeds_of_every_kind_are_taken() -> None:
    for rngs in (0, jnp.asarray(0).item(), jax.random.key(0), jax.random.PRNGKey(0), nnx.Rngs(0)):
        assert to_nnx(NORM, X, rngs=rngs)(X).shape == X.shape
    model = to_nnx(nn.Dense(4), X, rngs=0, collect=["intermediates"])
    assert model.linen_collections == ("intermediates",)
