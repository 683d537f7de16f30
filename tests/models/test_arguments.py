"""Arguments of another type are refused with the cure, and never by an error of Python."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from maxtext_data import checkpoint, config_of

import linen_compat
from nnx_pipeline import InputError, MeshConfig, Mixtral, RMSNorm, make_mesh
from nnx_pipeline.train import abstract_state

CONFIG = config_of()
SOURCE = checkpoint("scanned_params_only_bf16")
CURE_OF_A_NAME = "read it with linen_compat.config_from_maxtext or linen_compat.config_from_hugg"
WHOLE = "is of type ModelConfig and not Config; give a whole config, such as config_from_maxtext"


def model():
    return nnx.eval_shape(lambda: Mixtral(CONFIG, rngs=nnx.Rngs(0)))


def state():
    return abstract_state(CONFIG, mesh_of(""))


@pytest.mark.parametrize("load", [linen_compat.load, linen_compat.load_train_state])
@pytest.mark.parametrize(
    ("arguments", "mesh", "message"),
    [
        ((SOURCE, "old.yml"), None, f"config='old.yml' is the name of a file; {CURE_OF_A_NAME}"),
        ((SOURCE, CONFIG.model), None, f"config {WHOLE}"),
        ((SOURCE, 3), None, "config is of type int and not Config; give a whole config"),
        ((None, CONFIG), None, "checkpoint is of type NoneType; give the name of a folder"),
        (
            (SOURCE, CONFIG),
            MeshConfig(stage=2),
            r"mesh is of type MeshConfig; .* make_mesh\(mesh\)",
        ),
        ((SOURCE, CONFIG), "cpu", "mesh is of type str; give Mesh"),
    ],
)
def test_what_is_no_folder_config_or_mesh_is_not_loaded(load, arguments, mesh, message):
    with pytest.raises(InputError, match=message):
        load(*arguments, mesh=mesh)


def test_a_training_state_needs_a_config():
    with pytest.raises(InputError, match="config is of type NoneType and not Config"):
        linen_compat.load_train_state(checkpoint("unscanned"), None)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda to: linen_compat.save(state(), to), "TrainState; give its model, state.model, or"),
        (lambda to: linen_compat.save(np.ones(3), to), "model is of type ndarray; give Mixtral"),
        (lambda to: linen_compat.save(model(), None), "checkpoint is of type NoneType; give the"),
        (lambda to: linen_compat.save_train_state(model(), to), "save it with linen_compat.save$"),
        (lambda to: linen_compat.save_train_state(3, to), "state is of type int; give TrainState"),
        (lambda to: linen_compat.save_train_state(state(), None), "checkpoint is of type NoneTyp"),
    ],
)
def test_what_is_no_model_or_state_is_not_saved(tmp_path, save, message):
    with pytest.raises(InputError, match=message):
        save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: linen_compat.RMSNorm(CONFIG),
            "the config of RMSNorm is of type Config and not ModelConfig; give config.model",
        ),
        (lambda: linen_compat.MixtralDecoderLayer(CONFIG), "not ModelConfig; give config.model"),
        (lambda: linen_compat.Transformer(CONFIG.model), f"the config of Transformer {WHOLE}"),
        (
            lambda: linen_compat.Pipeline(CONFIG, linen_compat.RMSNorm(CONFIG.model), 4),
            "the config of Pipeline is of type Config and not PipelineConfig; give config.pipeline",
        ),
        (
            lambda: linen_compat.to_linen(RMSNorm, CONFIG),
            "config of RMSNorm is of type Config and not ModelConfig; give config.model",
        ),
        (lambda: linen_compat.to_linen(Mixtral, config=CONFIG.model), f"config of Mixtral {WHOLE}"),
    ],
)
def test_a_config_of_another_kind(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_mesh_of_devices_is_taken():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert linen_compat.load(str(SOURCE), CONFIG, mesh=mesh).config == CONFIG
