"""A model whose weights an adapter changes while they are read, from a checkpoint of any format."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from linen_compat.formats import _streams as streams
from linen_compat.formats._comparison import first_of
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import PARAMETERS, ArraySpec, SourceOfParts
from linen_compat.formats.huggingface._architectures import written_as
from linen_compat.formats.huggingface._peft import Adapter
from linen_compat.formats.huggingface._stream import folder_config, is_huggingface, tensors_of
from linen_compat.formats.huggingface._tensors import Index, Tensors
from linen_compat.formats.huggingface.config import architecture_of, read_config_json
from nnx_pipeline import InputError
from nnx_pipeline.config.model import ModelConfig


def problems_of_adapter(
    adapter: Adapter | None, checkpoint: str | Path, model: ModelConfig
) -> list[str]:
    """A line for each tensor of an adapter that has no place in the model of a checkpoint."""
    return adapter.problems(_tensors(checkpoint, model).specs()) if adapter else []


def _tensors(checkpoint: str | Path, model: ModelConfig) -> Tensors:
    """The tensors that a model has in transformers, by which PEFT names its matrices."""
    kind = written_as(model)
    if is_huggingface(checkpoint):
        kind = architecture_of(read_config_json(checkpoint))
    return tensors_of(model, model_arrays(model), kind)


def merged(
    source: SourceOfParts, adapter: Adapter | None, checkpoint: str | Path, model: ModelConfig
) -> SourceOfParts:
    """The parameters of a checkpoint with those of an adapter, if there is one."""
    if adapter is None:
        return source
    if len(source.parts) > 1:
        raise InputError(
            f"{adapter.folder} changes the weights, and the moments of the optimizer would no "
            "longer fit them; convert the parameters alone with --parameters-only"
        )
    if problems := problems_of_adapter(adapter, checkpoint, model):
        raise streams.Mismatch(f"{adapter.folder} does not fit: {first_of(problems)}")
    return MergedSource(source, adapter, _tensors(checkpoint, model), _scale_of(checkpoint, model))


class MergedSource:
    """A source of the parameters of `base`, changed by an adapter.

    A changed array is computed in float32, and has the dtype of the stored one. `scale` is the
    factor on scores for which transformers has the query kernels.
    """

    parts: tuple[str, ...] = (PARAMETERS,)

    def __init__(
        self, base: SourceOfParts, adapter: Adapter, tensors: Tensors, scale: float
    ) -> None:
        self.base, self._adapter, self._tensors = base, adapter, tensors
        self.num_layers, self.num_dense_layers = base.num_layers, base.num_dense_layers
        self.attention_scale, self.order, self.dtype = base.attention_scale, base.order, base.dtype
        self.name, self.close = base.name, base.close
        self.hold, self.release = base.hold, base.release
        stored = streams.scale_in_arrays(base.arrays, scale)
        self._ratio = streams.ratio_of(stored, base.attention_scale)
        streams.check_ratio(base.arrays, self._ratio)
        self._specs = tensors.specs()

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
        names = self._tensors.names(path, layer)
        ratio = np.float32(self._ratio if path in streams.SCALED else 1.0)
        if names[0] in self._adapter.replaced:
            new = self._tensors.join(path, names, self._replacement, index)
            array = (new * ratio).astype(array.dtype)
        if self._adapter.changes(names):
            grown = self._tensors.join(path, names, self._delta, index) * ratio
            array = (array.astype(np.float32) + grown).astype(array.dtype)
        return array

    def _replacement(self, name: str, index: Index) -> np.ndarray:
        return self._adapter.read(self._adapter.replaced[name], index)

    def _delta(self, name: str, index: Index) -> np.ndarray:
        """Zeros for an expert without an adapter beside one that has one."""
        found = self._adapter.delta(name, index)
        if found is not None:
            return found
        sizes = zip(self._specs[name].shape, index, strict=True)
        return np.zeros([len(range(size)[cut]) for size, cut in sizes], np.float32)


def _scale_of(checkpoint: str | Path, model: ModelConfig) -> float:
    if is_huggingface(checkpoint):
        return folder_config(checkpoint).model.attention_scale
    return model.attention_scale if written_as(model).scale else model.head_dim**-0.5
