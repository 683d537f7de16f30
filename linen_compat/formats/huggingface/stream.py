"""Hugging Face's Mixtral and Llama, folders of safetensors, read and written as streams of layers.

Folders hold weights and `config.json`; tokenizers and generation settings are not touched.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linen_compat import checksums
from linen_compat.checkpoint import is_orbax
from linen_compat.compare import Comparison, Difference, model_arrays
from linen_compat.huggingface_config import (
    CONFIG_FILE,
    IGNORED,
    config_from_huggingface,
    config_to_huggingface,
    read_config,
)
from linen_compat.huggingface_tensors import KNOWN_EXTRA, Index, Tensors, is_fused
from linen_compat.new_folder import new_folder
from linen_compat.safetensors_folder import (
    SHARD_BYTES,
    NewTensorFolder,
    TensorFolder,
    holds_tensors,
)
from linen_compat.streams import (
    PARAMETERS,
    QUERY,
    ArraySpec,
    Mismatch,
    Source,
    copy,
    scaled,
)
from nnx_pipeline import Config, InputError
from nnx_pipeline.config import ModelConfig

# What a model computes depends on these, and a `config.json` that says otherwise than its own
# tensors is of no use to transformers either.
_MUST_AGREE = (
    *("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_experts", "num_experts_per_token"),
    *("num_heads", "num_kv_heads", "head_dim"),
    *("norm_epsilon", "norm_scale_offset", "rope_theta"),
)


def is_huggingface(checkpoint: str | Path) -> bool:
    """Whether a folder is a Hugging Face model, complete or not, and no Orbax checkpoint.

    A `config.json` may lie beside an Orbax checkpoint, of whatever it is the config.
    """
    folder = Path(checkpoint)
    return (folder / CONFIG_FILE).is_file() and (holds_tensors(folder) or not is_orbax(folder))


def own_config(folder: str | Path) -> Config:
    """The config that a folder's own `config.json` describes.

    Raises Mismatch where the folder is of a model that is not supported, or its `config.json` is
    damaged, and InputError where there is none.
    """
    try:
        return config_from_huggingface(folder)
    except InputError as error:
        if (Path(folder) / CONFIG_FILE).is_file():
            raise Mismatch(f"{folder}: {error}") from error
        raise


def config_for(folder: str | Path, config: Config | None) -> Config:
    """The config to read a folder with: the one given, or without one the folder's own.

    One that does not say the longest sequence of the model gets that of the folder, so that it is
    there when the model is saved. Errors: of `own_config`.
    """
    own = own_config(folder)
    if config is None or config.model.max_position_embeddings is not None:
        return config or own
    longest = own.model.max_position_embeddings
    model = dataclasses.replace(config.model, max_position_embeddings=longest)
    return dataclasses.replace(config, model=model)


def write(
    source: Source,
    folder: str | Path,
    config: Config,
    *,
    shard_bytes: int = SHARD_BYTES,
    allow_nan: bool = True,
) -> None:
    """Copies a source, of a model of that config, to a new folder that `transformers` loads.

    shard_bytes: the most that one file takes, one tensor at least.
    """
    with new_folder(folder) as new:
        destination = HuggingFaceDestination(new, config, source.arrays, shard_bytes=shard_bytes)
        copy(source, destination, allow_nan=allow_nan)


def compare(folder: str | Path, model: ModelConfig) -> Comparison:
    """Compares the tensors and the config of a folder with what this model needs."""
    return _compare(folder, TensorFolder(folder), model)


class HuggingFaceSource:
    """A Hugging Face model to be read, once every tensor is accounted for. See `streams.Source`.

    model: the model that is to hold it; None for that of its own `config.json`. Arrays have the
    dtypes that are stored, and the query kernels are scaled for `model.attention_scale`. Raises as
    `load`.
    """

    parts: tuple[str, ...] = (PARAMETERS,)

    def __init__(self, folder: str | Path, model: ModelConfig | None = None) -> None:
        own = own_config(folder).model
        model = model or own
        self._files = TensorFolder(folder)
        _compare(folder, self._files, model).require(folder)
        self.num_layers, self.attention_scale = model.num_layers, model.attention_scale
        self.scalars: Mapping[str, np.ndarray] = {}
        self._ratio = own.attention_scale / model.attention_scale
        self._tensors = _tensors_of(model, self._files)
        self.arrays = {path: self._as_stored(path) for path in self._tensors.arrays}

    def order(self, path: str) -> Sequence[int]:
        return range(self.num_layers)

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: Index = ()
    ) -> np.ndarray:
        """index: a part of the array, the whole by default."""
        array = self._tensors.join(path, layer, self._files.read, index)
        return scaled(array, self._ratio) if path == QUERY and self._ratio != 1.0 else array

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        names = self._tensors.names(path, layer)
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def close(self) -> None:
        """Nothing is held between reads."""

    def _as_stored(self, path: str) -> ArraySpec:
        names = self._tensors.of_kind(path)
        return ArraySpec(self._tensors.arrays[path].shape, self._files.specs[names[0]].dtype)


class HuggingFaceDestination:
    """A folder of safetensors and `config.json`, being written. See `streams.Destination`.

    config: of the model that is written. arrays: as of `streams.Source`, with the dtypes to write;
    `config.json` names the one they share, else `param_dtype`. Raises InputError when transformers
    has no such model.
    """

    parts: tuple[str, ...] = (PARAMETERS,)

    def __init__(
        self,
        folder: Path,
        config: Config,
        arrays: Mapping[str, ArraySpec],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder = folder
        self.attention_scale = config.model.head_dim**-0.5
        self._values = config_to_huggingface(config)
        dtypes = {spec.dtype.name for spec in arrays.values()}
        if len(dtypes) == 1:
            self._values["torch_dtype"] = dtypes.pop()
        self._tensors = Tensors(arrays, config.model.num_layers)
        self._files = NewTensorFolder(folder, self._tensors.specs(), shard_bytes)

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        if part not in self.parts:
            raise InputError(f"a Hugging Face folder has no place for {part}; leave it behind")
        names = self._tensors.names(path, layer)
        for name, tensor in zip(names, self._tensors.split(path, array), strict=True):
            self._files.write(name, tensor)

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """`scalars` have no place here and are left behind."""
        sums = self._files.finish()
        text = json.dumps(self._values, indent=2)
        (self.folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
        sums[CONFIG_FILE] = checksums.of_values(_kept(self._values))
        checksums.write(self.folder, sums)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of `config.json` the model depends on; the rest may be edited."""
    return {key: value for key, value in values.items() if key not in IGNORED}


def _tensors_of(model: ModelConfig, files: TensorFolder) -> Tensors:
    return Tensors(model_arrays(model), model.num_layers, fused=is_fused(files.specs))


def _compare(folder: str | Path, files: TensorFolder, model: ModelConfig) -> Comparison:
    own, result = own_config(folder).model, Comparison()
    if files.sums is not None:
        sum_of_config = checksums.of_values(_kept(read_config(folder)))
        checksums.require(Path(folder), files.sums, CONFIG_FILE, sum_of_config)
    for name in _MUST_AGREE:
        if getattr(own, name) != getattr(model, name):
            result.notes.append(
                f"{CONFIG_FILE} has {name}={getattr(own, name)}, the model {getattr(model, name)}"
            )
    tensors = _tensors_of(model, files)
    expected = tensors.specs()
    for name, spec in expected.items():
        found = files.specs.get(name)
        if found is None:
            result.missing.append(name)
        elif found.shape != spec.shape:
            result.reshaped.append(Difference(name, _text(found.shape), _text(spec.shape)))
        else:
            result.matched.append(name)
            if found.dtype != spec.dtype:
                result.recast.append(Difference(name, found.dtype.name, spec.dtype.name))
    for name in files.specs:
        if name not in expected:
            (result.ignored if KNOWN_EXTRA.fullmatch(name) else result.extra).append(name)
    result.notes.extend(_mixed_dtypes(tensors, files))
    return result


def _mixed_dtypes(tensors: Tensors, files: TensorFolder) -> Iterator[str]:
    """What is wrong with tensors of one kind, which are one array here, in their dtypes."""
    for path in tensors.arrays:
        names = [name for name in tensors.of_kind(path) if name in files.specs]
        dtypes = {name: files.specs[name].dtype for name in names}
        for name, dtype in dtypes.items():
            if dtype != dtypes[names[0]]:
                yield (
                    f"{name} is {dtype} and {names[0]} is {dtypes[names[0]]}; "
                    "save the model with one dtype for tensors of one kind"
                )
                break


def _text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
