"""Checks whether a checkpoint fits a model: by its metadata, its bytes and its results."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from linen_compat.checkpoints import _reference as reference
from linen_compat.checkpoints.loading import load
from linen_compat.formats import _streams as streams
from linen_compat.formats._comparison import Comparison, compare_to_load, first_of
from linen_compat.formats._in_memory import for_mesh
from linen_compat.formats._intact import Json, Unchanged
from linen_compat.formats._merged import AnyAdapter, problems_of_adapter, without_merged
from linen_compat.formats._names import PATHS_OUTSIDE, ROUTER_BIAS, TOKENS
from linen_compat.formats._orbax.arrays import StoredArrays
from linen_compat.formats._orbax.inspect import Inspection, inspect
from linen_compat.formats._orbax.layouts import HUGGINGFACE, NNX
from linen_compat.formats._orbax.stream import OrbaxSource, read_scalars
from linen_compat.formats._plausible import problem_of, suspicion, zeros_in_a_row
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import PARAMETERS, Mismatch, walk
from linen_compat.formats.huggingface import _stream as huggingface
from linen_compat.formats.huggingface._folder import TensorFolder, files_of
from linen_compat.formats.huggingface._stream import is_huggingface
from linen_compat.formats.huggingface._tensors import KNOWN_EXTRA
from nnx_pipeline import Config, InputError, Mixtral
from nnx_pipeline.lab._files import place

NUMERICS_TOLERANCE = 1e-4  # as a fraction of the largest value, both sides in float32


@dataclass(frozen=True)
class Diagnosis:
    """A checkpoint compared with a config.

    `checkpoint` is the folder of the arrays, or the given one where it cannot be read. `format` and
    the three numbers are None then, and for a checkpoint of another model. `optimizer` is a line
    about the optimizer's state, where a reader needs one.
    """

    checkpoint: Path
    format: str | None
    num_layers: int | None
    stages: int | None
    repeats: int | None
    comparison: Comparison
    optimizer: str | None = None

    def to_json(self) -> Json:
        comparison = self.comparison
        return {
            "schema": 1,
            "checkpoint": str(self.checkpoint),
            "layout": self.format,
            "num_layers": self.num_layers,
            "stages": self.stages,
            "repeats": self.repeats,
            "fits": not comparison.problems,
            "optimizer": self.optimizer,
            **dataclasses.asdict(comparison),
            "fresh": comparison.fresh,
        }


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two computations of a model differ; None when none does.

    `largest` is the largest difference there, or anywhere, relative to the largest expected value.
    """

    place: str | None
    largest: float


def diagnose(
    checkpoint: str | Path, config: Config, adapter: AnyAdapter | None = None
) -> Diagnosis:
    """Compares names, shapes, dtypes and the optimizer's counts with what a model needs, and those
    of an adapter with the model.

    What does not fit or cannot be read is in the result; no checkpoint at all is an InputError. The
    state of another optimizer than AdamW is no misfit: `load` leaves it out.
    """
    try:
        if is_huggingface(checkpoint):
            comparison = huggingface.compare_folder(checkpoint, config.model)
            comparison.notes.extend(problems_of_adapter(adapter, checkpoint, config.model))
            layers = huggingface.folder_config(checkpoint).model.num_layers
            return Diagnosis(place(checkpoint), HUGGINGFACE, layers, 1, 1, comparison)
        contents = without_merged(inspect(checkpoint), adapter)
        layout, judged = contents.layout, _judged(contents)
        comparison = compare_to_load(judged, config.model)
        comparison.notes.extend(problems_of_adapter(adapter, checkpoint, config.model))
        optimizer = _of_optimizer(contents, comparison, config)
        if not comparison.problems:
            wrong = problem_of(read_scalars(judged))
            comparison.notes.extend([wrong] if wrong else [])
    except Mismatch as error:
        none = Comparison(notes=[str(error)])
        return Diagnosis(place(checkpoint), None, None, None, None, none)
    numbers = (layout.num_layers, layout.stages, layout.repeats)
    return Diagnosis(contents.items, layout.format, *numbers, comparison, optimizer)


def _judged(contents: Inspection) -> Inspection:
    """All of a checkpoint, or its parameters alone beside another optimizer's state."""
    return contents.parameters_alone if contents.other_optimizer else contents


def _of_optimizer(contents: Inspection, comparison: Comparison, config: Config) -> str | None:
    """A sentence about the optimizer's state, where a reader needs one; else None."""
    if other := contents.other_optimizer:
        return (
            f"{other}: linen_compat.load and convert --parameters-only leave it out, "
            "linen_compat.load_train_state refuses it"
        )
    if not contents.optimizer or not comparison.problems:
        return None
    alone = compare_to_load(contents.parameters_alone, config.model)
    if alone.problems:
        return None
    return "the parameters alone fit: linen_compat.load and convert --parameters-only take them"


def read_everything(
    diagnosis: Diagnosis,
    config: Config,
    *,
    adapter: AnyAdapter | None = None,
    allow_nan: bool = False,
    progress: streams.Progress = streams.no_progress,
) -> int:
    """Reads every byte of a checkpoint without problems, and returns the number of bytes.

    Those of an adapter are read and counted too.

    Raises Mismatch, naming the leaf, when bytes are missing or have changed, a parameter or a
    moment is NaN or infinite, a second moment is below 0, or training cannot have produced an array
    (`plausible`). Raises Mismatch, naming the file, when a file changes meanwhile.
    """
    total, strange = 0, dict[str, str]()
    files = files_of(diagnosis.checkpoint) if diagnosis.format == HUGGINGFACE else None
    with Unchanged(diagnosis.checkpoint, files):
        of_adapter = _every_tensor(adapter) if adapter else ()
        for read in itertools.chain(_every_array(diagnosis, config), of_adapter):
            array, part = read.array, read.part
            if part is not None:
                streams.check_finite(array, read.name, allow_nan=allow_nan)
                streams.check_sign(array, read.name, part)
                problem = suspicion(
                    array, part, rows_may_be_zero=read.of_tokens, all_may_be_zero=read.may_be_zero
                )
                if problem:
                    strange.setdefault(read.name, problem)
            total += array.nbytes
            progress(read.name, array.nbytes)
    if diagnosis.format != HUGGINGFACE:
        strange = {**_zeros_as_stored(diagnosis, config), **strange}
    if strange:
        raise Mismatch(
            f"{first_of([f'{name} {problem}' for name, problem in strange.items()])}; every byte "
            "could be read, but such values suggest a damaged file: compare it with another copy, "
            "or take an earlier checkpoint"
        )
    return total


@dataclass(frozen=True)
class _Read:
    """An array of a checkpoint, with its part of the model's state, and which zeros it may have."""

    name: str
    array: np.ndarray
    part: str | None = None
    of_tokens: bool = False
    may_be_zero: bool = False


def _every_array(diagnosis: Diagnosis, config: Config) -> Iterator[_Read]:
    if diagnosis.format == HUGGINGFACE:
        # Tensors are read as stored: a lost block of zeros is contiguous there, and scattered in
        # the arrays of a model.
        files = TensorFolder(diagnosis.checkpoint)
        for name in files.specs:
            part = None if KNOWN_EXTRA.fullmatch(name) else PARAMETERS
            of_tokens = any(names.huggingface == name for names in TOKENS)
            is_bias = name.endswith(ROUTER_BIAS.huggingface)
            yield _Read(name, files.read(name, ()), part, of_tokens, is_bias)
        return
    contents = _judged(inspect(diagnosis.checkpoint))
    source = OrbaxSource(contents, model_arrays(config.model))
    stored = StoredArrays(contents.items)
    for leaf in (*contents.scalars.values(), *contents.ignored.values()):
        yield _Read(leaf.stored, stored.read(leaf.stored))
    tokens, natural = {names.nnx for names in TOKENS}, _may_be_zero(config)
    for part in source.parts:
        for path, layer in walk(source):
            name, array = source.name(path, layer, part), source.read(path, layer, part)
            yield _Read(name, array, part, path in tokens, path in natural)
    source.check_files()  # after the arrays, whose errors name what is lost


def _every_tensor(adapter: AnyAdapter) -> Iterator[_Read]:
    for name in adapter.specs:  # a matrix B is zero before training
        yield _Read(name, adapter.read(name), PARAMETERS, may_be_zero=True)


def _zeros_as_stored(diagnosis: Diagnosis, config: Config) -> dict[str, str]:
    """Runs of zeros that cannot be right, by the names of the stored arrays."""
    # A lost block is contiguous on disk; in memory it may be spread over the layers of a stack.
    source = OrbaxSource(inspect(diagnosis.checkpoint), model_arrays(config.model))
    left_out = PATHS_OUTSIDE | _may_be_zero(config)
    stored = {source.name(*slot): slot for slot in walk(source) if slot[0] not in left_out}
    zeros = {name: zeros_in_a_row(source.in_order(*slot)) for name, slot in stored.items()}
    return {name: strange for name, strange in zeros.items() if strange}


def _may_be_zero(config: Config) -> set[str]:
    """NNX paths of arrays that are zero before training: router biases, scales with an offset."""
    if not config.model.norm_scale_offset:
        return {ROUTER_BIAS.nnx}
    paths = model_arrays(config.model)
    return {ROUTER_BIAS.nnx, *(path for path in paths if path.endswith("norm.scale"))}


def check_comparable(diagnosis: Diagnosis) -> None:
    """Raises InputError for a checkpoint without the names of `compare_with_maxtext`."""
    if diagnosis.format in (HUGGINGFACE, NNX):
        raise InputError(
            f"--numerics works on MaxText's formats only, and {diagnosis.checkpoint} is "
            f"{diagnosis.format}; convert it to maxtext:unscanned first"
        )


def compare_with_maxtext(checkpoint: str | Path, config: Config) -> FirstDifference:
    """Compares the loaded model with MaxText's mathematics, both in float32."""
    contents, largest = inspect(checkpoint), 0.0
    config = for_mesh(config, None)
    model = dataclasses.replace(config.model, dtype="float32")
    config = dataclasses.replace(config, model=model)
    length = min(32, config.train.sequence_length)
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=(2, length))
    with jax.default_matmul_precision("highest"):
        states = _states_of(load(checkpoint, config), jnp.asarray(tokens, jnp.int32))
        expected = reference.hidden_states(contents, model, tokens)
        for (name, theirs), ours in zip(expected, states, strict=True):
            scale = max(float(np.max(np.abs(theirs))), 1e-12)  # all of them may be zero
            difference = float(np.max(np.abs(np.asarray(ours) - theirs))) / scale
            if not difference <= NUMERICS_TOLERANCE:  # unlike `>`, this is true of NaN
                return FirstDifference(name, difference)
            largest = max(largest, difference)
    return FirstDifference(None, largest)


def _states_of(model: Mixtral, tokens: jax.Array) -> Iterator[jax.Array]:
    """Yields the output of the embedding, of each layer, and the logits."""
    x = jax.jit(lambda embedding, tokens: embedding(tokens))(model.embedding, tokens)
    yield x
    apply = jax.jit(lambda layer, x: layer(x)[0])
    for number in range(model.config.model.num_dense_layers):
        x = apply(jax.tree.map(lambda leaf, at=number: leaf[at], model.dense_layers), x)
        yield x
    stack = model.pipeline.runner.stack
    places = stack.places
    for number in range(stack.layers):
        at = np.unravel_index(places[number], stack.shape)
        layer = jax.tree.map(lambda leaf, at=at: leaf[at], model.pipeline.layers)
        x = apply(layer, x)
        yield x
    yield jax.jit(lambda model, tokens: model(tokens))(model, tokens)
