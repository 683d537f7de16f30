"""Values and gradients of Mixtral are those of `transformers`, whichever way experts compute.

The routers of `mixtral` load four experts unevenly, that of `mixtral_empty` never chooses the last
of five, and that of `mixtral_single` always chooses the second of four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, replace
from huggingface_reference import FOLDER, WITH_GRADIENTS

from linen_compat import load
from linen_compat.formats.huggingface.config import config_from_huggingface
from nnx_pipeline import Mixtral


def model_of(name: str, experts: str) -> tuple[Mixtral, Mixtral]:
    """The model of a kept folder, and its gradients as a model of the same form."""
    folder = FOLDER / name
    config = config_from_huggingface(folder)
    changes = {"dtype": "float32", "param_dtype": "float32", "experts": experts}
    if experts == "capacity":  # room for all tokens at one expert
        changes["capacity_factor"] = float(config.model.num_experts)
    config = replace(config, "model", **changes)
    return load(folder, config), load(folder / "gradients", config)


def loss_of(model: Mixtral, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean loss of the next token, and the logits."""
    logits = model(tokens)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -chosen.mean(), logits


# Every way with an uneven load; an expert without tokens where rows are counted; one choice once.
WAYS = {
    "mixtral": ("dense", "grouped", "capacity"),
    "mixtral_empty": ("grouped", "capacity"),
    "mixtral_single": ("grouped",),
}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("name", "experts"), [(name, way) for name in WITH_GRADIENTS for way in WAYS[name]]
)
def test_values_and_gradients(name: str, experts: str) -> None:
    model, want = model_of(name, experts)
    reference = np.load(FOLDER / name / "reference.npz")
    tokens = jnp.asarray(reference["tokens"], jnp.int32)
    gradients, logits = jax.jit(jax.grad(loss_of, has_aux=True))(model, tokens)
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-5)
    if name == "mixtral_single":  # the weight of one chosen expert is 1, whatever the router says
        for tree in (gradients, want):
            router = tree.pipeline.layers.feed_forward.router
            assert jnp.abs(router.get_value()).max() < 1e-9
            router[...] = jnp.zeros_like(router.get_value())
    assert_close(gradients, want, 1e-5)


def test_the_references_are_what_they_are_named_for() -> None:
    """An expert without tokens has no gradient; each of the others has one."""
    used = {
        "mixtral": [1, 1, 1, 1],
        "mixtral_empty": [1, 1, 1, 1, 0],
        "mixtral_single": [0, 1, 0, 0],
    }
    for name, want in used.items():
        _, gradients = model_of(name, "dense")
        down = gradients.pipeline.layers.feed_forward.down.get_value()
        largest = np.asarray(jnp.abs(down).max(axis=(-1, -2))).reshape(-1, len(want))
        assert ((largest > 0) == np.array(want, bool)).all(), name
