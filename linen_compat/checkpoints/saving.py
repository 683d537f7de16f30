"""Saves models as checkpoints of any format."""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import jax
import numpy as np

from linen_compat.formats._arguments import check_folder, check_savable_model
from linen_compat.formats._in_memory import ModelSource
from linen_compat.formats._names import ORBAX, check_one_kind
from linen_compat.formats._new_folder import Room, new_folder
from linen_compat.formats._orbax.layouts import FORMATS, HUGGINGFACE, NNX, PIPELINED, TreeLayout
from linen_compat.formats._orbax.parts import Part
from linen_compat.formats._orbax.stream import OrbaxDestination
from linen_compat.formats._plausible import LARGEST_STEP, check_scalars, is_count
from linen_compat.formats._processes import agree, check_in_all, from_first
from linen_compat.formats._streams import PARAMETERS, LayerSource, copy, nbytes_of
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.maxtext._families import check_maxtext
from nnx_pipeline import InputError, Mixtral
from nnx_pipeline.lab._files import place
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

    - `model`: may be sharded over the devices of several processes, which then all call this.
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

    Raises InputError when the folder is not empty, when several processes do not share it or hold
    parts of what is to be a Hugging Face folder, when MaxText or transformers has no such model, or
    when it takes more bytes than are free; and OSError, naming `checkpoint`, when the disk is full.
    Nothing is left behind then.
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
    write = begin_orbax(source, layout, [checkpoint])
    if _spread(source):
        agree(write)
    else:  # one of several processes may save alone what it holds
        write()


def _spread(source: LayerSource) -> TypeGuard[ModelSource]:
    return isinstance(source, ModelSource) and source.is_spread


def begin_orbax(
    source: LayerSource, layout: TreeLayout, folders: Sequence[str | Path]
) -> Callable[[], None]:
    """Begins to write a checkpoint; what is returned writes it, and may run in another thread.

    - `folders`: the new folder, or the ones that are to be made, each in the one before it.

    Of a source that is spread over several processes all must begin, in their main threads. What
    is returned then writes what this process holds. In process 0 it waits for the others, whose
    errors it raises.
    """
    check_scalars(source.scalars)  # so that the checkpoint can be read again
    room = Room(nbytes_of(source), by_tensorstore=True)

    def opened(stack: contextlib.ExitStack) -> Path:
        first, *below = folders
        folder = stack.enter_context(new_folder(first, None if below else room))
        for name in below:
            folder = stack.enter_context(new_folder(folder / name, room))
        return folder

    def write() -> None:
        with contextlib.ExitStack() as stack:
            copy(source, OrbaxDestination(source, opened(stack), layout), allow_nan=True)

    return _begin_part(source, layout, opened) if _spread(source) else write


def _begin_part(
    source: ModelSource, layout: TreeLayout, opened: Callable[[contextlib.ExitStack], Path]
) -> Callable[[], None]:
    stack = contextlib.ExitStack()  # of process 0: the folder gets its name when it is closed
    mark, _, name = from_first(lambda: f"{secrets.token_hex(8)} {opened(stack)}").partition(" ")
    folder, number = place(name), jax.process_index()
    part = Part(number, jax.process_count(), mark)
    with stack:
        check_in_all(
            part.can_begin(folder),
            lambda lacking: (
                f"{folder}, which process 0 has made, is not seen by process {lacking}, or cannot "
                "be written by it; choose a folder on a file system that all processes share"
            ),
        )
        begun = stack.pop_all()

    def write() -> None:
        with begun:
            try:
                destination = OrbaxDestination(source, folder, layout, part=part)
                destination.write_own(source)
            except BaseException as error:
                if number:
                    part.fail(folder, error)
                else:  # before the folder is removed, which they would make again
                    part.wait_for_others(folder)
                raise
            destination.commit(source.scalars)

    return write
