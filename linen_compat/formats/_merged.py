"""A model whose weights an adapter changes while they are read, from a checkpoint of any format."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from linen_compat.formats import _streams as streams
from linen_compat.formats._comparison import first_of
from linen_compat.formats._maxtext_lora import MaxTextAdapter, MaxTextChanges
from linen_compat.formats._orbax.inspect import Inspection, existing_folder, is_orbax
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import PARAMETERS, ArraySpec, SourceOfParts
from linen_compat.formats.huggingface._architectures import written_as
from linen_compat.formats.huggingface._peft import TENSORS, Adapter
from linen_compat.formats.huggingface._stream import folder_config, is_huggingface, tensors_of
from linen_compat.formats.huggingface._tensors import Index
from linen_compat.formats.huggingface.config import architecture_of, read_config_json
from nnx_pipeline import InputError
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab._files.stores import StorePath
from nnx_pipeline.lab.errors import note

AnyAdapter = Adapter | MaxTextAdapter


def adapter_of(folder: str | Path | None, checkpoint: str | Path) -> AnyAdapter | None:
    """The adapter in a folder; notes one that lies beside a model and is another one."""
    taken: AnyAdapter | None = None
    if folder is not None:
        existing_folder(folder)
        of_peft = (place(folder) / TENSORS).is_file() or not is_orbax(folder)
        taken = Adapter(folder) if of_peft else MaxTextAdapter(folder)
    for file in sorted(place(checkpoint).glob("adapter_*"))[:1]:  # one has several files
        if taken is None or not _are_same(taken.folder, file.parent):
            note(
                f"{file} is an adapter beside the model and is not read; if the model is meant "
                "with it, give its folder as --adapter (adapter of load), or merge it first "
                "(merge_and_unload of peft)"
            )
    return taken


def _are_same(one: Path, other: Path) -> bool:
    if isinstance(one, StorePath) or isinstance(other, StorePath):
        return str(one) == str(other)
    return one.samefile(other)


def files_of_adapter(adapter: AnyAdapter | None) -> list[Path]:
    return [] if adapter is None else adapter.files


def without_merged(contents: Inspection, adapter: AnyAdapter | None) -> Inspection:
    """A checkpoint without the matrices of LoRA that it holds itself, if these are merged."""
    if isinstance(adapter, MaxTextAdapter) and _are_same(adapter.items, contents.items):
        return dataclasses.replace(contents, lora={})
    return contents


class Changes(Protocol):
    """What an adapter makes of the arrays of one model.

    `scale` is the factor on scores for which it has the query kernels; None with latent attention.
    `problems` has a line for each of its arrays that has no place in the model.
    """

    scale: float | None
    problems: list[str]

    def new(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        """A part of what takes the place of an array; None where it stays."""

    def grown(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        """What a part of an array grows by, in float32; None where it stays as it is."""


class PeftChanges:
    """What an adapter of PEFT makes of arrays, by the tensors that they are in transformers."""

    def __init__(self, adapter: Adapter, checkpoint: str | Path, model: ModelConfig) -> None:
        kind, scale = written_as(model), model.attention_scale
        if is_huggingface(checkpoint):
            kind = architecture_of(read_config_json(checkpoint))
            scale = folder_config(checkpoint).model.attention_scale
        elif not kind.scale:
            scale = model.head_dim**-0.5
        self._adapter, self._tensors = adapter, tensors_of(model, model_arrays(model), kind)
        self._specs = self._tensors.specs()
        self.scale = streams.scale_in_arrays(self._tensors.arrays, scale)
        self.problems = adapter.problems(self._specs)

    def new(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        names = self._tensors.names(path, layer)
        if names[0] not in self._adapter.replaced:
            return None
        return self._tensors.join(path, names, self._replacement, index)

    def grown(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        names = self._tensors.names(path, layer)
        if not self._adapter.changes(names):
            return None
        return self._tensors.join(path, names, self._delta, index)

    def _replacement(self, name: str, index: Index) -> np.ndarray:
        return self._adapter.read(self._adapter.replaced[name], index)

    def _delta(self, name: str, index: Index) -> np.ndarray:
        """Zeros for an expert without an adapter beside one that has one."""
        found = self._adapter.delta(name, index)
        if found is not None:
            return found
        sizes = zip(self._specs[name].shape, index, strict=True)
        return np.zeros([len(range(size)[cut]) for size, cut in sizes], np.float32)


def changes_of(adapter: AnyAdapter, checkpoint: str | Path, model: ModelConfig) -> Changes:
    if isinstance(adapter, MaxTextAdapter):
        return MaxTextChanges(adapter, model)
    return PeftChanges(adapter, checkpoint, model)


def problems_of_adapter(
    adapter: AnyAdapter | None, checkpoint: str | Path, model: ModelConfig
) -> list[str]:
    """A line for each array of an adapter that has no place in the model of a checkpoint."""
    return changes_of(adapter, checkpoint, model).problems if adapter else []


def merged(
    source: SourceOfParts, adapter: AnyAdapter | None, checkpoint: str | Path, model: ModelConfig
) -> SourceOfParts:
    """The parameters of a checkpoint with those of an adapter, if there is one."""
    if adapter is None:
        return source
    if len(source.parts) > 1:
        raise InputError(
            f"{adapter.folder} changes the weights, and the moments of the optimizer would no "
            "longer fit them; convert the parameters alone with --parameters-only"
        )
    changes = changes_of(adapter, checkpoint, model)
    if changes.problems:
        raise streams.Mismatch(f"{adapter.folder} does not fit: {first_of(changes.problems)}")
    return MergedSource(source, changes)


class MergedSource:
    """A source of the parameters of `base`, changed by an adapter.

    A changed array is computed in float32, and has the dtype of the stored one.
    """

    parts: tuple[str, ...] = (PARAMETERS,)

    def __init__(self, base: SourceOfParts, changes: Changes) -> None:
        self.base, self._changes = base, changes
        self.num_layers, self.num_dense_layers = base.num_layers, base.num_dense_layers
        self.attention_scale, self.order, self.dtype = base.attention_scale, base.order, base.dtype
        self.rotary, self.name, self.close = base.rotary, base.name, base.close
        self.hold, self.release = base.hold, base.release
        self._ratio = streams.ratio_of(changes.scale, base.attention_scale)
        streams.check_ratio(base.arrays, self._ratio)

    @property
    def arrays(self) -> Mapping[str, ArraySpec]:
        return self.base.arrays

    @property
    def scalars(self) -> Mapping[str, np.ndarray]:
        return self.base.scalars

    def read(
        self, path: str, layer: int | None, part: str = PARAMETERS, index: Index = ()
    ) -> np.ndarray:
        array = self.base.read(path, layer, part, index)
        ratio = np.float32(self._ratio if path in streams.SCALED else 1.0)
        if (new := self._changes.new(path, layer, index)) is not None:
            array = (new * ratio).astype(array.dtype)
        if (grown := self._changes.grown(path, layer, index)) is not None:
            array = (array.astype(np.float32) + grown * ratio).astype(array.dtype)
        return array
