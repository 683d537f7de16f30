"""What a checkpoint would become in a model, before anything is loaded."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linen_compat import huggingface, reference
from linen_compat.checkpoint import Inspection, inspect
from linen_compat.compare import Comparison, compare_to_load, model_arrays
from linen_compat.huggingface import is_huggingface
from linen_compat.huggingface_tensors import KNOWN_EXTRA
from linen_compat.layouts import HUGGINGFACE, NNX
from linen_compat.loading import load
from linen_compat.names import NORMS, OUTSIDE, TOKENS
from linen_compat.orbax_streams import OrbaxSource, read_scalars
from linen_compat.placing import for_mesh
from linen_compat.plausible import suspicion, zeros_in_a_row
from linen_compat.safetensors_folder import TensorFolder
from linen_compat.scalars import problem_of
from linen_compat.stored import StoredArrays
from linen_compat.streams import (
    PARAMETERS,
    Mismatch,
    Progress,
    check_finite,
    check_sign,
    no_progress,
    walk,
)
from nnx_pipeline import Config, InputError, Mixtral

NUMERICS_TOLERANCE = 1e-4  # of the largest value, both in float32


@dataclass(frozen=True)
class Diagnosis:
    """A checkpoint beside a config. format, num_layers, stages, repeats: what it holds.

    They are None of one that cannot be read, or is of another model.
    """

    checkpoint: Path
    format: str | None
    num_layers: int | None
    stages: int | None
    repeats: int | None
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        found = self.comparison
        return {
            "schema": 1,
            "checkpoint": str(self.checkpoint),
            "layout": self.format,
            "num_layers": self.num_layers,
            "stages": self.stages,
            "repeats": self.repeats,
            "fits": not found.problems,
            **dataclasses.asdict(found),
            "fresh": found.fresh,
        }


@dataclass(frozen=True)
class Parting:
    """Where two computations part.

    place: the first layer that differs, None when none does."""

    place: str | None
    largest: float


def diagnose(checkpoint: str | Path, config: Config) -> Diagnosis:
    """Compares names, shapes and dtypes, and the counts of an optimizer; no array is read.

    The folder may be of any format. What does not fit, or cannot be read, is in the result; raises
    InputError where there is no checkpoint.
    """
    try:
        return _diagnose(checkpoint, config)
    except Mismatch as error:
        none = Comparison(notes=[str(error)])
        return Diagnosis(Path(checkpoint), None, None, None, None, none)


def _diagnose(checkpoint: str | Path, config: Config) -> Diagnosis:
    if is_huggingface(checkpoint):
        comparison = huggingface.compare(checkpoint, config.model)
        layers = huggingface.own_config(checkpoint).model.num_layers
        return Diagnosis(Path(checkpoint), HUGGINGFACE, layers, 1, 1, comparison)
    found = inspect(checkpoint)
    layout, comparison = found.layout, compare_to_load(found, config.model)
    if not comparison.problems:
        wrong = problem_of(read_scalars(found))
        comparison.notes.extend([wrong] if wrong else [])
    numbers = (layout.num_layers, layout.stages, layout.repeats)
    return Diagnosis(found.items, layout.format, *numbers, comparison)


def read_everything(
    diagnosis: Diagnosis,
    config: Config,
    *,
    allow_nan: bool = False,
    progress: Progress = no_progress,
) -> int:
    """Reads each byte of a checkpoint that fits, and returns their number.

    Raises Mismatch, naming the leaf, where bytes are missing or not those that were written, a
    value is NaN or infinite, a second moment is below 0, or an array is no result of training
    (`plausible`).
    """
    total, strange = 0, dict[str, str]()
    for read in _every_array(diagnosis, config):
        array = read.array
        if jnp.issubdtype(array.dtype, jnp.floating):
            check_finite(array, read.name, allow_nan=allow_nan)
        if read.part is not None:
            check_sign(array, read.name, read.part)
            found = suspicion(
                array,
                read.part,
                rows_may_be_zero=read.of_tokens,
                all_may_be_zero=read.may_be_zero,
            )
            if found:
                strange.setdefault(read.name, found)
        total += array.nbytes
        progress(read.name, array.nbytes)
    if diagnosis.format != HUGGINGFACE:
        strange = {**_zeros_as_stored(diagnosis, config), **strange}
    if strange:
        shown = [f"{name} {found}" for name, found in strange.items()][:3]
        more = f"; and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise Mismatch(
            f"{'; '.join(shown)}{more}; the bytes could be read, and the file may be damaged "
            "all the same: compare it with another copy, or take an earlier checkpoint"
        )
    return total


@dataclass(frozen=True)
class _Read:
    """An array that was read. part: of the model's state, None for all else. of_tokens: whether
    one of its axes is the vocabulary. may_be_zero: whether all of it may."""

    name: str
    array: np.ndarray
    part: str | None = None
    of_tokens: bool = False
    may_be_zero: bool = False


def _every_array(diagnosis: Diagnosis, config: Config) -> Iterator[_Read]:
    if diagnosis.format == HUGGINGFACE:
        # As they are stored: a block of zeros is one there, and scattered in an array of a model.
        files = TensorFolder(diagnosis.checkpoint)
        for name in files.specs:
            part = None if KNOWN_EXTRA.fullmatch(name) else PARAMETERS
            of_tokens = any(names.huggingface == name for names in TOKENS)
            yield _Read(name, files.read(name, ()), part, of_tokens)
        return
    found = inspect(diagnosis.checkpoint)
    source = OrbaxSource(found, model_arrays(config.model))
    stored = StoredArrays(found.items)
    for leaf in (*found.scalars.values(), *found.ignored.values()):
        yield _Read(leaf.stored, stored.read(leaf.stored))
    tokens, natural = {names.nnx for names in TOKENS}, _may_be_zero(config)
    for part in source.parts:
        for path, layer in walk(source):
            name, array = source.name(path, layer, part), source.read(path, layer, part)
            yield _Read(name, array, part, path in tokens, path in natural)
    source.check_files()


def _zeros_as_stored(diagnosis: Diagnosis, config: Config) -> dict[str, str]:
    """What of stored arrays cannot be right, by their names: the zeros in the order on disk.

    A block of zeros there has a part in each layer of a scanned stack, and is scattered in an array
    whose chunks are cut along its last axis.
    """
    source = OrbaxSource(inspect(diagnosis.checkpoint), model_arrays(config.model))
    outside = {names.nnx for names in OUTSIDE}
    left_out = outside | _may_be_zero(config)
    stored = {source.name(*place): place for place in walk(source) if place[0] not in left_out}
    found = {name: zeros_in_a_row(source.in_order(*place)) for name, place in stored.items()}
    return {name: strange for name, strange in found.items() if strange}


def _may_be_zero(config: Config) -> set[str]:
    """The arrays that are zero before they are trained: scales with an offset."""
    norms = (*NORMS, *(names for names in OUTSIDE if names.nnx == "norm.scale"))
    return {names.nnx for names in norms} if config.model.norm_scale_offset else set()


def check_names(diagnosis: Diagnosis) -> None:
    """Raises InputError for a checkpoint without the names that `compare_numerics` reads."""
    if diagnosis.format in (HUGGINGFACE, NNX):
        raise InputError(
            f"--numerics reads MaxText's names, and {diagnosis.checkpoint} has none; "
            "convert it to maxtext:unscanned first"
        )


def compare_numerics(checkpoint: str | Path, config: Config, *, seed: int = 0) -> Parting:
    """The loaded model beside MaxText's mathematics over the stored names, layer by layer.

    Both in float32 on the same random tokens. The whole model is loaded on the default device.
    The checkpoint is one of MaxText (`check_names`).
    """
    found = inspect(checkpoint)
    config = for_mesh(config, None)
    model = dataclasses.replace(config.model, dtype="float32")
    config = dataclasses.replace(config, model=model)
    length = min(32, config.train.sequence_length)
    tokens = np.random.default_rng(seed).integers(model.vocab_size, size=(2, length))
    with jax.default_matmul_precision("highest"):
        states = _states_of(load(checkpoint, config), jnp.asarray(tokens, jnp.int32))
        return _first_difference(states, found, config, tokens)


def _first_difference(
    states: Iterator[jax.Array], found: Inspection, config: Config, tokens: np.ndarray
) -> Parting:
    largest = 0.0
    expected = reference.hidden_states(found, config.model, tokens)
    for (place, theirs), ours in zip(expected, states, strict=True):
        scale = max(float(np.max(np.abs(theirs))), 1e-12)
        difference = float(np.max(np.abs(np.asarray(ours) - theirs))) / scale
        if not difference <= NUMERICS_TOLERANCE:
            return Parting(place, difference)
        largest = max(largest, difference)
    return Parting(None, largest)


def _states_of(model: Mixtral, tokens: jax.Array) -> Iterator[jax.Array]:
    """What the embedding and each layer return, and the logits of the model as it is called."""
    x = jax.jit(lambda embedding, tokens: embedding(tokens))(model.embedding, tokens)
    yield x
    apply = jax.jit(lambda layer, x: layer(x)[0])
    for number in range(model.config.model.num_layers):
        layer = jax.tree.map(lambda leaf, at=number: leaf[0, 0, at], model.pipeline.layers)
        x = apply(layer, x)
        yield x
    yield jax.jit(lambda model, tokens: model(tokens))(model, tokens)
