"""Loads checkpoints of any format into a model on a mesh."""

from pathlib import Path

from jax.sharding import Mesh

from linen_compat.arguments import check_to_load
from linen_compat.formats.comparison import compare_to_load, model_arrays
from linen_compat.formats.huggingface.folder import files_of
from linen_compat.formats.huggingface.stream import HuggingFaceSource, config_for, is_huggingface
from linen_compat.formats.load_shards import load_from
from linen_compat.formats.orbax.inspect import Inspection, find_items, inspect
from linen_compat.formats.orbax.stream import OrbaxSource
from linen_compat.formats.unchanged import Unchanged
from linen_compat.named_config import config_of
from nnx_pipeline import Config, InputError, Mixtral


def load(
    checkpoint: str | Path, config: Config | None = None, *, mesh: Mesh | None = None
) -> Mixtral:
    """The model of a config with the parameters of a checkpoint, placed on a mesh.

    - `checkpoint`: a checkpoint of MaxText, in any layout, or of this project, given as a run (its
      latest step is taken), a step or its folder of arrays; it may hold parameters alone, or beside
      them the state of any optimizer (below `opt_state` or `optimizer`), which is left out. Or a
      Hugging Face folder. The stages and repeats of the checkpoint need not be those of the mesh
      and the config.
    - `config`: the config of the model. None means that of the checkpoint: the `config.json` of a
      Hugging Face folder, or the `config.yml` of a run of `nnx-pipeline train`. With another one
      than that of a Hugging Face folder the query kernels are scaled where its `attention_scale` is
      not head_dim^-0.5, and query and key are reordered where it has `rope_interleaved`. With
      latent attention it must agree with `config.json` in both.
    - `mesh`: None for that of `jax.set_mesh`, and without one the first device
      (`jax.devices()[0]`). It must be able to hold the weights; whether a batch splits over it is
      checked when there is a batch. If the layers of a stage do not split into the config's number
      of repeats, the largest smaller number that fits is used. `model.config` holds the config
      that was used.

    Arrays are read one at a time, each in its own sharding: only the shards that devices of this
    process hold are read. Values are those stored; the dtype becomes `config.model.param_dtype`. No
    parameter is ever left at an initial value.

    Warns (`nnx_pipeline.errors.Note`) of parameters that are NaN or infinite, of keys of a
    `config.json` that are unknown and switch nothing on, and of an adapter beside the model.

    Raises InputError for an argument of another type, when the checkpoint cannot be read or changes
    meanwhile, when a leaf is missing, unknown or of another shape (`streams.Mismatch`, which names
    it), or when the `config.json` of a Hugging Face folder is of a model that computes something
    else.
    """
    check_to_load(checkpoint, config, mesh)
    if is_huggingface(checkpoint):
        with Unchanged(checkpoint, files_of(checkpoint)):
            config = config_for(checkpoint, config)
            return load_from(HuggingFaceSource(checkpoint, config.model), config, mesh)
    config = config_of(checkpoint) if config is None else config
    if config is None:
        raise InputError(
            f"{checkpoint} does not hold the config of its model; give one, such as the result of "
            "config_from_maxtext"
        )
    with Unchanged(find_items(checkpoint)):
        return load_from(open_source(inspect(checkpoint).parameters_alone, config), config, mesh)


def open_source(found: Inspection, config: Config) -> OrbaxSource:
    """A checkpoint as a source of parameters, once every leaf is accounted for.

    - `found`: an Orbax checkpoint that has been inspected.
    - `config`: of the model that is to take the parameters.

    Raises Mismatch when a leaf is missing, unknown or of another shape, or when the query kernels
    are for another `attention_scale`.
    """
    compare_to_load(found, config.model).require(found.items)
    return OrbaxSource(found, model_arrays(config.model))
