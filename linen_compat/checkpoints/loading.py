"""Loads checkpoints of any format into a model on a mesh."""

from pathlib import Path

from jax.sharding import Mesh

from linen_compat.checkpoints._named_config import stored_config
from linen_compat.formats._arguments import check_folder, check_to_load
from linen_compat.formats._comparison import compare_to_load
from linen_compat.formats._in_memory import load_from
from linen_compat.formats._intact import Unchanged
from linen_compat.formats._merged import adapter_of, files_of_adapter, merged, without_merged
from linen_compat.formats._orbax.inspect import Inspection, find_items, inspect
from linen_compat.formats._orbax.stream import OrbaxSource
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import Rotary, SourceOfParts
from linen_compat.formats.huggingface._folder import files_of
from linen_compat.formats.huggingface._stream import HuggingFaceSource, config_for, is_huggingface
from nnx_pipeline import Config, InputError, Mixtral


def load(
    checkpoint: str | Path,
    config: Config | None = None,
    *,
    mesh: Mesh | None = None,
    adapter: str | Path | None = None,
) -> Mixtral:
    """The model of a config with the parameters of a checkpoint, placed on a mesh.

    - `checkpoint`: of MaxText, in any layout, or of this project: a run (its latest step is
      loaded), a step, or the folder of its arrays. The state of any optimizer (below `opt_state` or
      `optimizer`) is left out. Or a Hugging Face folder. Stages and repeats of the checkpoint need
      not be those of the mesh and the config.
    - `config`: the config of the model. None takes the checkpoint's own: the `config.json` of a
      Hugging Face folder, or the `config.yml` of a run of `nnx-pipeline train`. With another config
      than its own, the query kernels of a Hugging Face folder are scaled where `attention_scale` is
      not head_dim^-0.5, and query and key are reordered for `rope_interleaved`. With latent
      attention the config must agree with `config.json` in both.
    - `mesh`: None for the mesh of `jax.set_mesh`, and without one the first device
      (`jax.devices()[0]`). It must be able to hold the weights. Whether a batch splits over it is
      checked when the model is called. `model.config` has the largest number of repeats up to the
      config's into which the layers of a stage split.
    - `adapter`: the folder of a LoRA adapter of PEFT or MaxText for this model, which is merged
      into the weights: computed in float32, rounded to the dtype in which the checkpoint has each.

    Arrays are read one at a time, and of each array only the shards of devices of this process.
    Values are as stored, cast to `config.model.param_dtype`. No parameter keeps its initial value.

    Warns (`nnx_pipeline.lab.errors.Note`) of parameters that are NaN or infinite, of keys of a
    `config.json` that are unknown and switch nothing on, and of another adapter beside the model.

    Raises InputError for an argument of another type, when the checkpoint cannot be read or changes
    meanwhile, when a leaf (which the message names) is missing, unknown or of another shape, or
    when the `config.json` of a Hugging Face folder is of a model that computes something else.
    """
    check_to_load(checkpoint, config, mesh)
    if adapter is not None:
        check_folder(adapter, "adapter")
    added = adapter_of(adapter, checkpoint)
    if is_huggingface(checkpoint):
        with Unchanged(checkpoint, [*files_of(checkpoint), *files_of_adapter(added)]):
            config = config_for(checkpoint, config)
            source: SourceOfParts = HuggingFaceSource(checkpoint, config.model)
            return load_from(merged(source, added, checkpoint, config.model), config, mesh)
    config = stored_config(checkpoint) if config is None else config
    if config is None:
        raise InputError(
            f"{checkpoint} does not hold the config of its model; give one, such as the result of "
            "config_from_maxtext"
        )
    with Unchanged(find_items(checkpoint)), Unchanged("", files_of_adapter(added)):
        source = open_source(without_merged(inspect(checkpoint), added).parameters_alone, config)
        return load_from(merged(source, added, checkpoint, config.model), config, mesh)


def open_source(contents: Inspection, config: Config) -> OrbaxSource:
    """A checkpoint as a source of the parameters, once every leaf is accounted for."""
    compare_to_load(contents, config.model).require(contents.items)
    return OrbaxSource(contents, model_arrays(config.model), rotary=Rotary.of(config.model))
