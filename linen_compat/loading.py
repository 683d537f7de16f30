"""Checkpoints of any format into a model on a mesh."""

from pathlib import Path

from jax.sharding import Mesh

from linen_compat.checkpoint import Inspection, inspect
from linen_compat.compare import compare_to_load, model_arrays
from linen_compat.huggingface import HuggingFaceSource, config_for, is_huggingface
from linen_compat.orbax_streams import OrbaxSource
from linen_compat.placing import load_from
from nnx_pipeline import Config, InputError, Mixtral


def load(
    checkpoint: str | Path, config: Config | None = None, *, mesh: Mesh | None = None
) -> Mixtral:
    """The model of a config with the parameters of a checkpoint, placed on the mesh.

    checkpoint: one of MaxText, in any layout, or one of this project: a run (its latest step), a
    step, or the items folder, a full training state or parameters alone. The stages and repeats of
    the checkpoint need not be those of the mesh and the config. Or a Hugging Face folder.
    config: for a Hugging Face folder None means that of its `config.json`; with another one the
    query kernels are scaled where its `attention_scale` is not head_dim^-0.5.
    mesh: None for that of `jax.set_mesh`, and without one the default device. It needs to hold the
    weights; whether a batch splits over it is checked when there is one. On a mesh without stages
    the layers run one after the other, and what the config says of a pipeline is left out; on one
    with stages, where the layers do not split into the config's repeats, there are as many below
    that as they do split into (`model.config` has the number).

    Every array is read in the parts that devices of this process hold, in its own sharding, one
    array at a time. Values are those stored; the dtype becomes `config.model.param_dtype`.

    Raises InputError when the checkpoint cannot be read or a leaf is missing, unknown or of another
    shape (`streams.Mismatch`, which names it), or when the `config.json` of a Hugging Face folder
    is of a model that computes something else; no parameter is ever left at an initial value.
    """
    if is_huggingface(checkpoint):
        config = config_for(checkpoint, config)
        return load_from(HuggingFaceSource(checkpoint, config.model), config, mesh)
    if config is None:
        raise InputError(
            f"{checkpoint} does not say what its model computes; give a config, such as that of "
            "config_from_maxtext"
        )
    return load_from(open_source(inspect(checkpoint), config), config, mesh)


def open_source(found: Inspection, config: Config) -> OrbaxSource:
    """The checkpoint as a source, once every leaf is accounted for. Raises Mismatch otherwise."""
    compare_to_load(found, config.model).require(found.items)
    return OrbaxSource(found, model_arrays(config.model))
