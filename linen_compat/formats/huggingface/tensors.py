"""Which tensors of a Hugging Face model hold an array here, and how they lie in it.

Kernels are `[out, in]` there and `[in, out]` here, heads and their dimensions apart; experts are
tensors of their own there and one stack here. Both rotate halves of a head, so that nothing is
permuted. No file is read in this module.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from linen_compat.names import OUTSIDE, of_layer
from linen_compat.streams import ArraySpec

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]

# transformers keeps the experts of a layer in two tensors in memory, and writes one for each matrix
# of each expert, unless it is called with `save_original_format=False`. Both are read here.
_FUSED = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.gate": "mlp.experts.gate_up_proj",
    "feed_forward.up": "mlp.experts.gate_up_proj",
    "feed_forward.down": "mlp.experts.down_proj",
}
# Buffers that old versions saved: computed from the config, by transformers too.
KNOWN_EXTRA = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_AS_IT_IS = ("embedding.embedding", "norm.scale", "attention_norm.scale", "feed_forward_norm.scale")
_STACKED = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
_INPUT_AXES = {"attention.out": 2}  # of a kernel here; 1 of all others
_EXPERT = "<expert>"


@dataclass(frozen=True)
class Tensors:
    """The tensors of a model with these arrays (as of `streams.Source`), named and shaped.

    fused: whether the experts of a layer are in two tensors, `[experts, out, in]`.
    """

    arrays: Mapping[str, ArraySpec]
    num_layers: int
    fused: bool = False

    def specs(self) -> dict[str, ArraySpec]:
        """Every tensor with its shape and dtype, layer after layer."""
        first, *last = (names.nnx for names in OUTSIDE)
        layers = [path for path in self.arrays if path not in (first, *last)]
        order: list[tuple[str, int | None]] = [(first, None)]
        order += [(path, layer) for layer in range(self.num_layers) for path in layers]
        order += [(path, None) for path in last]
        found = {}
        for path, layer in order:
            for name in self.names(path, layer):
                found[name] = ArraySpec(self._shape(path), self.arrays[path].dtype)
        return found

    def names(self, path: str, layer: int | None) -> tuple[str, ...]:
        """The tensors of one array of one layer: one, or one for each expert."""
        if layer is None:
            return (next(names.huggingface for names in OUTSIDE if names.nnx == path),)
        name = self._name(path)
        experts = range(self.arrays[path].shape[0]) if _EXPERT in name else range(1)
        return tuple(
            f"model.layers.{layer}.{name.replace(_EXPERT, str(expert))}" for expert in experts
        )

    def of_kind(self, path: str) -> tuple[str, ...]:
        """The tensors of one array in all layers."""
        outside = any(path == names.nnx for names in OUTSIDE)
        layers = (None,) if outside else range(self.num_layers)
        return tuple(name for layer in layers for name in self.names(path, layer))

    def join(self, path: str, layer: int | None, read: Read, index: Index = ()) -> np.ndarray:
        """One array of one layer, or the part of it that `index` names.

        read: gives a part of a tensor, by name and slices.
        """
        shape = self.arrays[path].shape
        index = index or (slice(None),) * len(shape)
        names = self.names(path, layer)
        if path in _AS_IT_IS:
            return read(names[0], index)
        if not self._is_stack(path):
            return _kernel(path, lambda cut: read(names[0], cut), index, shape)
        experts = range(shape[0])[index[0]]
        parts = (
            _kernel(path, self._of_expert(path, names, expert, read), index[1:], shape[1:])
            for expert in experts
        )
        return _stack(parts, len(experts))

    def split(self, path: str, array: np.ndarray) -> Iterator[np.ndarray]:
        """The tensors of one array, in the order of `names`; not of a fused form."""
        if path in _AS_IT_IS:
            yield array
        elif self._is_stack(path):
            for expert in array:
                yield expert.T
        else:
            inputs = math.prod(array.shape[: _INPUT_AXES.get(path, 1)])
            yield array.reshape(inputs, -1).T

    def _name(self, path: str) -> str:
        if self.fused and path in _FUSED:
            return _FUSED[path]
        experts = 2 if self._has_experts else 1
        return next(names.huggingface for names in of_layer(experts) if names.nnx == path)

    @property
    def _has_experts(self) -> bool:
        return "feed_forward.router" in self.arrays

    def _is_stack(self, path: str) -> bool:
        return self._has_experts and path in _STACKED

    def _shape(self, path: str) -> tuple[int, ...]:
        shape = self.arrays[path].shape
        if path in _AS_IT_IS:
            return shape
        if self._is_stack(path):
            experts, inputs, outputs = shape
            if not self.fused:
                return outputs, inputs
            halves = 1 if path.endswith("down") else 2
            return experts, halves * outputs, inputs
        inputs = math.prod(shape[: _INPUT_AXES.get(path, 1)])
        return math.prod(shape) // inputs, inputs

    def _of_expert(
        self, path: str, names: tuple[str, ...], expert: int, read: Read
    ) -> Callable[[Index], np.ndarray]:
        """Reads parts of the kernel `[out, in]` of one expert."""
        if not self.fused:
            return lambda index: read(names[expert], index)
        outputs = self.arrays[path].shape[2]
        start = outputs if path.endswith("up") else 0  # gate and up, one below the other

        def read_fused(index: Index) -> np.ndarray:
            rows = range(outputs)[index[0]]
            cut = slice(start + rows.start, start + rows.stop)
            return read(names[0], (slice(expert, expert + 1), cut, *index[1:]))[0]

        return read_fused


def is_fused(names: Mapping[str, object]) -> bool:
    """Whether a model has the experts of a layer in two tensors."""
    return any(name.endswith(_FUSED["feed_forward.gate"]) for name in names)


def _kernel(
    path: str, read: Callable[[Index], np.ndarray], index: Index, shape: tuple[int, ...]
) -> np.ndarray:
    """A part of a kernel of that shape from a tensor `[out, in]`."""
    axes = _INPUT_AXES.get(path, 1)
    chosen = [len(range(size)[cut]) for cut, size in zip(index, shape, strict=True)]
    inputs, outputs = _rows(index[:axes], shape[:axes]), _rows(index[axes:], shape[axes:])
    flat = read((outputs, inputs)).T
    kernel = flat.reshape(chosen[0], *shape[1:axes], chosen[axes], *shape[axes + 1 :])
    rest = (slice(None) if axis in (0, axes) else cut for axis, cut in enumerate(index))
    return kernel[tuple(rest)]


def _rows(index: Index, shape: tuple[int, ...]) -> slice:
    """The rows of a flattened group of axes that hold what `index` says of the first of them."""
    chosen, inner = range(shape[0])[index[0]], math.prod(shape[1:])
    return slice(chosen.start * inner, chosen.stop * inner)


def _stack(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Arrays of one shape as one, holding one of them at a time beside it."""
    first = next(parts)
    stack = np.empty((count, *first.shape), first.dtype)
    stack[0] = first
    for place, part in enumerate(parts, start=1):
        stack[place] = part
    return stack
