"""Hugging Face's models, folders of safetensors, read and written as streams of layers."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from linen_compat.formats import _intact as checksums
from linen_compat.formats import _streams as streams
from linen_compat.formats._comparison import Comparison
from linen_compat.formats._names import OUTSIDE
from linen_compat.formats._new_folder import Room, new_folder
from linen_compat.formats._orbax.inspect import is_orbax
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import PARAMETERS, ArraySpec, Mismatch, times_ratio
from linen_compat.formats.huggingface._architecture import CONFIG_FILE, FURTHER, Architecture, Keys
from linen_compat.formats.huggingface._architectures import written_as
from linen_compat.formats.huggingface._folder import (
    SHARD_BYTES,
    NewTensorFolder,
    TensorFolder,
    holds_tensors,
)
from linen_compat.formats.huggingface._tensors import KNOWN_EXTRA, Index, Tensors, is_fused
from linen_compat.formats.huggingface.config import (
    IGNORED,
    architecture_of,
    config_from_huggingface,
    config_to_huggingface,
    read_config_json,
)
from nnx_pipeline import Config, InputError
from nnx_pipeline.config._model_rules import OF_ROUTER, ROPE_SCALINGS
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab.errors import counted, note

_TABLE, _HEAD = OUTSIDE[0].huggingface, OUTSIDE[-1].huggingface
_ROWS = 1024  # of two tensors that are compared, held in memory at a time
# A model computes by these fields. transformers cannot use a `config.json` that contradicts its own
# tensors either.
_MUST_AGREE = (
    *("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_experts", "num_experts_per_token"),
    *("num_heads", "num_kv_heads", "head_dim"),
    *("norm_epsilon", "norm_scale_offset", "qk_norm", "tied_embeddings"),
    *("norm_placement", "qk_norm_over_heads", "latent_norm_epsilon", "activation"),
    *("embedding_scale", "residual_scale", "logits_divisor", "rope_window_theta"),
    *("rope_theta", "rope_scaling", *ROPE_SCALINGS["llama3"], "rope_truncate", "rope_amplitude"),
    *("num_dense_layers", "dense_mlp_dim", *OF_ROUTER, "router_groups_per_token"),
    *("kv_lora_rank", "q_lora_rank", "rope_head_dim", "value_head_dim"),
    *("attention_sinks", "router_logits_bias", "expert_bias"),
    *("sliding_window", "full_attention_every", "full_attention_first", "attention_bias"),
    *("attention_soft_cap", "logits_soft_cap"),
)


def is_huggingface(checkpoint: str | Path) -> bool:
    """Whether a folder is a Hugging Face model, complete or not."""
    folder = place(checkpoint)  # an unrelated config.json may lie beside an Orbax checkpoint
    return (folder / CONFIG_FILE).is_file() and (holds_tensors(folder) or not is_orbax(folder))


def folder_config(folder: str | Path) -> Config:
    """The config that a folder's own `config.json` describes."""
    try:
        return config_from_huggingface(folder)
    except InputError as error:
        if (place(folder) / CONFIG_FILE).is_file():
            raise Mismatch(f"{folder}: {error}") from error
        raise


def config_for(folder: str | Path, config: Config | None) -> Config:
    """The config to read a folder with: the one that is given, or else the folder's own."""
    stored_config = folder_config(folder)
    if config is None or config.model.max_position_embeddings is not None:
        return config or stored_config
    longest = stored_config.model.max_position_embeddings  # to be there when the model is saved
    model = dataclasses.replace(config.model, max_position_embeddings=longest)
    return dataclasses.replace(config, model=model)


def write_huggingface(
    source: streams.LayerSource,
    folder: str | Path,
    config: Config,
    *,
    shard_bytes: int = SHARD_BYTES,
    allow_nan: bool = True,
) -> None:
    """Copies the parameters of a model of a config to a new folder for `transformers`."""
    with new_folder(folder, Room(streams.nbytes_of(source), by_tensorstore=False)) as new:
        destination = HuggingFaceDestination(new, config, source.arrays, shard_bytes=shard_bytes)
        streams.copy(source, destination, allow_nan=allow_nan)


def compare_folder(folder: str | Path, model: ModelConfig) -> Comparison:
    """Compares tensors and config of a folder with a model; at most a tied head is read."""
    return _compare(folder, TensorFolder(folder), model)


class HuggingFaceSource:
    """A Hugging Face model as a `LayerSource`, once every tensor is accounted for.

    The query kernels are scaled for the `attention_scale` of `model`; None is the folder's own.
    """

    parts: tuple[str, ...] = (PARAMETERS,)

    def __init__(self, folder: str | Path, model: ModelConfig | None = None) -> None:
        stored_model = folder_config(folder).model
        model = model or stored_model
        self._files = TensorFolder(folder)
        _compare(folder, self._files, model).require(folder)
        self.num_layers, self.num_dense_layers = model.num_layers, model.num_dense_layers
        self.scalars: Mapping[str, np.ndarray] = {}
        kind = architecture_of(read_config_json(folder))
        self._tensors = tensors_of(model, model_arrays(model), kind, self._files)
        arrays = self._tensors.arrays
        self.attention_scale = streams.scale_in_arrays(arrays, model.attention_scale)
        # In whose order the kernels are read.
        self.rotary: streams.Rotary | None = streams.Rotary.of(model)
        stored_scale = streams.scale_in_arrays(arrays, stored_model.attention_scale)
        self._ratio = streams.ratio_of(stored_scale, self.attention_scale)
        streams.check_ratio(arrays, self._ratio)
        stored = {path: self._files.specs[self._tensors.of_kind(path)[0]] for path in arrays}
        self.arrays = {
            path: ArraySpec(spec.shape, stored[path].dtype) for path, spec in arrays.items()
        }

    def order(self, path: str) -> Sequence[int]:
        return range(self._tensors.count(path))

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: Index = ()
    ) -> np.ndarray:
        array = self._tensors.join(path, self._tensors.names(path, layer), self._files.read, index)
        if path in streams.SCALED and self._ratio != 1.0:
            return times_ratio(array, self._ratio)
        return array

    def dtype(self, path: str, part: str = PARAMETERS) -> np.dtype:
        return self.arrays[path].dtype

    def name(self, path: str, layer: int | None, part: str = PARAMETERS) -> str:
        names = self._tensors.names(path, layer)
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def hold(self, name: str) -> None: ...

    def release(self, name: str) -> None: ...

    def close(self) -> None:
        """Nothing is kept between reads."""


class HuggingFaceDestination:
    """A new folder of safetensors and `config.json` as a `LayerDestination`."""

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
        kind = written_as(config.model)
        scale = config.model.attention_scale if kind.scale else config.model.head_dim**-0.5
        self.attention_scale = streams.scale_in_arrays(arrays, scale)
        self._values = config_to_huggingface(config)
        dtypes = {spec.dtype.name for spec in arrays.values()}
        if len(dtypes) == 1:
            self._values["torch_dtype"] = dtypes.pop()
        self._tensors = tensors_of(config.model, arrays, kind)
        self._files = NewTensorFolder(folder, self._tensors.specs(), shard_bytes)

    def write(
        self, path: str, layer: int | None, array: np.ndarray, part: str = PARAMETERS
    ) -> None:
        if part not in self.parts:
            raise InputError(f"a Hugging Face folder has no place for {part}; leave it out")
        names = self._tensors.names(path, layer)
        where = self._tensors.place(path)
        for name, tensor in zip(names, self._tensors.split(path, array), strict=True):
            self._files.write(name, tensor, where)

    def commit(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Writes the index, `config.json` and checksums; no scalar has a place."""
        sums = self._files.finish()
        text = json.dumps(self._values, indent=2)
        (self.folder / CONFIG_FILE).write_text(f"{text}\n", encoding="utf-8")
        sums[CONFIG_FILE] = checksums.of_values(_meaningful(self._values))
        checksums.write_checksums(self.folder, sums)


def _meaningful(values: Keys) -> checksums.Json:
    """The values of `config.json` that the model depends on; all others may be edited."""
    return {key: value for key, value in values.items() if key not in IGNORED}


def tensors_of(
    model: ModelConfig,
    arrays: Mapping[str, ArraySpec],
    kind: Architecture,
    files: TensorFolder | None = None,
) -> Tensors:
    """The tensors of a model; experts are fused where they are in these files."""
    fused = files is not None and is_fused(files.specs) and not kind.by_columns
    # transformers rotates halves; with latent attention the config says what it rotates.
    interleaved = model.rope_interleaved and model.kv_lora_rank is None
    layers, dense = model.num_layers, model.num_dense_layers
    return Tensors(arrays, layers, dense, kind.tensors, fused, interleaved, kind.by_columns)


def _compare(folder: str | Path, files: TensorFolder, model: ModelConfig) -> Comparison:
    stored_model, result = folder_config(folder).model, Comparison()
    if stored_model.tied_embeddings and _has_head(files):
        if model.tied_embeddings:
            result.notes.append(
                f"{_HEAD} differs from {_TABLE}, though {CONFIG_FILE} ties them: transformers 5 "
                "computes with it and transformers 4 does not; set tie_word_embeddings to false "
                "there to read it, or remove the tensor"
            )
        else:  # the config that was given says so
            stored_model = dataclasses.replace(stored_model, tied_embeddings=False)
    if files.sums is not None:  # this project wrote the folder
        sum_of_config = checksums.of_values(_meaningful(read_config_json(folder)))
        checksums.require(files.folder, files.sums, CONFIG_FILE, sum_of_config)
    differ = [name for name in _MUST_AGREE if getattr(stored_model, name) != getattr(model, name)]
    if model.kv_lora_rank is not None:  # no kernel is scaled or reordered for it
        if stored_model.rope_interleaved != model.rope_interleaved:
            differ.append("rope_interleaved")
        if not math.isclose(stored_model.attention_scale, model.attention_scale, rel_tol=1e-9):
            differ.append("attention_scale")
    result.notes.extend(
        f"{CONFIG_FILE} has {name}={getattr(stored_model, name)}, the model {getattr(model, name)}"
        for name in differ
    )
    values = read_config_json(folder)
    tensors = tensors_of(model, model_arrays(model), architecture_of(values), files)
    expected = tensors.specs()
    for name, spec in expected.items():
        result.add(name, files.specs.get(name), spec.shape, spec.dtype)
    for name in files.specs:
        if name not in expected:
            # A head that is not the table once more is noted above.
            unused = model.tied_embeddings and name == _HEAD
            known = unused or KNOWN_EXTRA.fullmatch(name)
            (result.ignored if known else result.extra).append(name)
    result.notes.extend(_mixed_dtypes(tensors, files))
    _leave_out_further(result, values, model.num_layers)
    return result


def _leave_out_further(result: Comparison, values: Keys, layers: int) -> None:
    """Takes from what is extra the modules that predict further tokens, and names them."""
    number = max((int(values.get(key) or 0) for key in FURTHER), default=0)
    names = tuple(f"model.layers.{layer}." for layer in range(layers, layers + number))
    further = [name for name in result.extra if name.startswith(names)] if names else []
    if further:
        result.extra[:] = [name for name in result.extra if not name.startswith(names)]
        result.ignored.extend(further)
        note(
            f"{further[0]} and {counted(len(further) - 1, 'other tensor')} are of modules that "
            "predict further tokens (multi-token prediction), and are not read"
        )


def _has_head(files: TensorFolder) -> bool:
    """Whether the files have a head whose values are not those of the embedding table."""
    table, head = files.specs.get(_TABLE), files.specs.get(_HEAD)
    if table is None or head is None:
        return False
    rows = table.shape[0] if table.shape else 0
    cuts = ((slice(at, min(at + _ROWS, rows)),) for at in range(0, rows, _ROWS))
    return table != head or any(
        files.read(_TABLE, cut).tobytes() != files.read(_HEAD, cut).tobytes() for cut in cuts
    )


def _mixed_dtypes(tensors: Tensors, files: TensorFolder) -> Iterator[str]:
    """A line for each array of the model whose tensors have several dtypes."""
    for path in tensors.arrays:
        names = [name for name in tensors.of_kind(path) if name in files.specs]
        first = files.specs[names[0]].dtype if names else None
        other = next((name for name in names if files.specs[name].dtype != first), None)
        if other is not None:
            yield (
                f"{other} is {files.specs[other].dtype} and {names[0]} is {first}; "
                "save the model with one dtype for tensors of one kind"
            )
