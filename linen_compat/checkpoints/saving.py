"""Saves models as checkpoints of any format."""

from pathlib import Path

import numpy as np

from linen_compat.formats._arguments import check_folder, check_savable_model
from linen_compat.formats._in_memory import ModelSource
from linen_compat.formats._names import ORBAX, check_one_kind
from linen_compat.formats._new_folder import Room, new_folder
from linen_compat.formats._orbax.layouts import FORMATS, HUGGINGFACE, NNX, PIPELINED, TreeLayout
from linen_compat.formats._orbax.stream import OrbaxDestination
from linen_compat.formats._plausible import LARGEST_STEP, check_scalars, is_count
from linen_compat.formats._streams import PARAMETERS, LayerSource, copy, nbytes_of
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.maxtext._families import check_maxtext
from nnx_pipeline import InputError, Mixtral
from nnx_pipeline.lab.errors import one_of


def save(
    model: Mixtral,
    checkpoint: str | Path,
    format: str = "maxtext:scanned",
    *,
    stages: int | None = None,
    repeats: int | None = None,
    step: int | None = None,
) -> None:
    """Writes the parameters of a model as a checkpoint in a new folder.

    - `model`: may be sharded over the devices of this process.
    - `checkpoint`: the folder to make; it must not exist yet, or be empty.
    - `format`: `maxtext:unscanned`, `maxtext:scanned`, `maxtext:pipelined` or `nnx`, which are
      Orbax checkpoints: the folder itself is what Orbax restores, and for MaxText's own arrangement
      of folders give `<run>/<step>/items`. Or `huggingface`, which `transformers` loads.
    - `stages`, `repeats`: how the layers are stacked, for `maxtext:pipelined` and `nnx` only; by
      default as in the model, or on one stage if `pipeline.stage_layers` leaves places empty.
    - `step`: the step to store; None stores none, and a Hugging Face folder has no place for one.

    Values and dtypes are those of the model, gathered one array at a time. Only query kernels can
    change: they are multiplied by the model's `attention_scale` divided by the format's. That is 1
    for MaxText, or head_dim^-0.5 with `qk_norm`; head_dim^-0.5 for Hugging Face; the model's own
    for `nnx`. With `rope_interleaved` query and key are in another order in a Hugging Face folder.
    With latent attention nothing changes, because the config says the factor on scores.

    Raises InputError when the folder is not empty, when the arrays are spread over several
    processes, when MaxText or transformers has no such model, or when it takes more bytes than are
    free; and OSError, naming `checkpoint`, when the disk is full. Nothing is left behind then.
    """
    check_savable_model(model)
    check_folder(checkpoint)
    one_of("format", format, (*FORMATS, HUGGINGFACE))
    if format == HUGGINGFACE:
        if (stages, repeats, step) != (None, None, None):
            raise InputError(
                f"stages={stages}, repeats={repeats}, step={step}: a Hugging Face folder has no "
                "place for them; leave them out"
            )
        source = ModelSource(model, {PARAMETERS: model}, {})
        huggingface.write_huggingface(source, checkpoint, model.config)
        return
    if step is not None and not is_count(step):
        raise InputError(f"step={step!r} is not a whole number from 0 to {LARGEST_STEP}")
    scalars = {} if step is None else {"step": np.asarray(step, np.int32)}
    source = ModelSource(model, {PARAMETERS: model}, scalars)
    write_orbax(source, checkpoint, layout_for(model, format, stages, repeats))


def layout_for(model: Mixtral, format: str, stages: int | None, repeats: int | None) -> TreeLayout:
    """The layout of a model's layers in an Orbax format, by default stacked as in the model."""
    check_one_kind(model.config.model, ORBAX)
    if format != NNX:
        check_maxtext(model.config.model)
    layers, dense = model.config.model.num_layers, model.config.model.num_dense_layers
    sizes = (1, 1)
    # Places without a layer are stored nowhere, nor which stage has how many.
    if format in (PIPELINED, NNX) and not model.pipeline.runner.stack.padding:
        sizes = model.pipeline.num_stages, model.pipeline.config.num_repeats
    stages, repeats = (
        default if number is None else number
        for number, default in zip((stages, repeats), sizes, strict=True)
    )
    return TreeLayout(format, layers, stages, repeats, dense)


def write_orbax(source: LayerSource, checkpoint: str | Path, layout: TreeLayout) -> None:
    """Copies a source to a new Orbax checkpoint; nothing is left behind when it fails."""
    check_scalars(source.scalars)  # so that the checkpoint can be read again
    with new_folder(checkpoint, Room(nbytes_of(source), by_tensorstore=True)) as folder:
        copy(source, OrbaxDestination(source, folder, layout), allow_nan=True)
