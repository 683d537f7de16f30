"""Shapes and dtypes of parameters, worked out from a config, are those of the model itself."""

import jax
import pytest
from flax import nnx
from test_published_configs import READ

from linen_compat import config_from_huggingface
from linen_compat.formats._in_memory import as_in_one_layer, parameter_paths
from linen_compat.formats._shapes import model_arrays
from nnx_pipeline import Config, Mixtral, PipelineConfig

# One published model of each class, among them all features that the table of classes names.
OF_CLASS = {values["architectures"][0]: name for name, (_, values) in READ.items()}


@pytest.mark.parametrize("name", OF_CLASS.values())
def test_they_are_those_of_the_traced_model_in_the_same_order(name: str) -> None:
    model = config_from_huggingface(READ[name][1]).model
    plain = Config(model=model, pipeline=PipelineConfig())
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        traced = jax.eval_shape(lambda: Mixtral(plain, rngs=nnx.Rngs(0)))
    expected = as_in_one_layer(parameter_paths(traced))
    assert [*model_arrays(model).items()] == [*expected.items()]
