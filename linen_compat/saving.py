"""Models out into checkpoints of any format."""

from pathlib import Path

import numpy as np

from linen_compat import huggingface
from linen_compat.layouts import FORMATS, HUGGINGFACE, NNX, PIPELINED, Layout
from linen_compat.model_source import ModelSource
from linen_compat.new_folder import new_folder
from linen_compat.orbax_streams import OrbaxDestination
from linen_compat.scalars import LARGEST, check_scalars, is_count
from linen_compat.streams import PARAMETERS, Source, copy
from nnx_pipeline import InputError, Mixtral
from nnx_pipeline.errors import one_of


def save(
    model: Mixtral,
    checkpoint: str | Path,
    format: str = "maxtext:scanned",
    *,
    stages: int | None = None,
    repeats: int | None = None,
    step: int | None = None,
) -> None:
    """Writes the parameters of a model, and `step` if it is given, as a checkpoint in a new folder.

    format: `maxtext:unscanned`, `maxtext:scanned`, `maxtext:pipelined`, or `nnx`, which are Orbax
    checkpoints: the folder itself is what Orbax restores, and for MaxText's own arrangement give
    `<run>/<step>/items`. Or `huggingface`, which `transformers` loads and which has no step.
    stages, repeats: of the pipelined layout, by default those of the model.

    Values and dtypes are those of the model, gathered one array at a time. Only where a model has
    an `attention_scale` other than 1, or for Hugging Face head_dim^-0.5, do the query kernels take
    the quotient in.

    Raises InputError when the folder holds something, the arrays are spread over several processes,
    or transformers has no such model. Nothing is left behind when it fails.
    """
    one_of("format", format, (*FORMATS, HUGGINGFACE))
    if format == HUGGINGFACE:
        if (stages, repeats, step) != (None, None, None):
            raise InputError(
                f"stages={stages}, repeats={repeats}, step={step}: a Hugging Face folder has no "
                "place for them; leave them out"
            )
        huggingface.write(ModelSource(model, {PARAMETERS: model}, {}), checkpoint, model.config)
        return
    if step is not None and not is_count(step):
        raise InputError(f"step={step!r} is not a whole number from 0 to {LARGEST}")
    scalars = {} if step is None else {"step": np.asarray(step, np.int32)}
    source = ModelSource(model, {PARAMETERS: model}, scalars)
    write(source, checkpoint, layout_for(model, format, stages, repeats))


def layout_for(model: Mixtral, format: str, stages: int | None, repeats: int | None) -> Layout:
    """The layout of that format, with the model's own stages and repeats unless told others."""
    layers = model.config.model.num_layers
    own = (1, 1)
    if format in (PIPELINED, NNX):
        own = model.pipeline.num_stages, model.pipeline.config.num_repeats
    stages, repeats = (
        default if given is None else given
        for given, default in zip((stages, repeats), own, strict=True)
    )
    return Layout(format, layers, stages, repeats)


def write(source: Source, checkpoint: str | Path, layout: Layout) -> None:
    """Copies a source to a new folder of this layout, its values as they are."""
    check_scalars(source.scalars)  # what is written can be read
    with new_folder(checkpoint) as folder:
        destination = OrbaxDestination(
            folder, layout, source.arrays, attention_scale=source.attention_scale
        )
        copy(source, destination, allow_nan=True)
