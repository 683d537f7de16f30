"""Which tensors of a Hugging Face model hold each array of this project, and in which layout.

Kernels are `[out, in]` there; here they are `[in, out]`, with one axis for the heads and one for
the dimensions of a head. Experts are tensors of their own there and one stack here.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from linen_compat.formats import _names as naming
from linen_compat.formats._names import EARLY, PATHS_OUTSIDE
from linen_compat.formats._streams import ArraySpec

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]

# In memory transformers keeps the experts of a layer in two tensors. It writes one tensor for each
# matrix of each expert, unless called with `save_original_format=False`. Both forms are read here.
_FUSED = {
    "feed_forward.router": "mlp.gate.weight",
    "feed_forward.gate": "mlp.experts.gate_up_proj",
    "feed_forward.up": "mlp.experts.gate_up_proj",
    "feed_forward.down": "mlp.experts.down_proj",
}
# Buffers that old versions saved; their values are computed from the config, by transformers too.
KNOWN_EXTRA = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_NORMS_OF_HEADS = tuple(
    names.nnx for names in naming.QK_NORMS
)  # or of the latent vectors of queries
_AS_IT_IS = (
    *("embedding.embedding", "norm.scale", "attention_norm.scale", "feed_forward_norm.scale"),
    *(*_NORMS_OF_HEADS, "attention.kv_norm.scale", naming.ROUTER_BIAS.nnx),
)
_ROTATED = ("attention.query", "attention.key", *_NORMS_OF_HEADS)  # their last axis is head_dim
_STACKED = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
_INPUT_AXES = {"attention.out": 2}  # how many axes of a kernel here are inputs; 1 for all others
_EXPERT = "<expert>"


@dataclass(frozen=True)
class Tensors:
    """The names and shapes of the tensors of a Hugging Face model with these arrays.

    - `fused`: whether the experts of a layer are in two tensors, `[experts, out, in]`.
    - `interleaved`: whether the arrays are for `ModelConfig.rope_interleaved`, where a model of
      transformers has halves. With latent attention both sides have the same order.
    """

    arrays: Mapping[str, ArraySpec]
    num_layers: int
    num_dense_layers: int = 0
    fused: bool = False
    interleaved: bool = False

    def specs(self) -> dict[str, ArraySpec]:
        """Shape and dtype of every tensor by its name, layer after layer."""
        first, *last = (names.nnx for names in naming.of_model(self.arrays)[0])
        layers = [path for path in self.arrays if path not in (first, *last)]
        order: list[tuple[str, int | None]] = [(first, None)]
        for early in (True, False):
            paths = [path for path in layers if path.startswith(EARLY) == early]
            count = self.count(paths[0]) if paths else 0
            order += [(path, layer) for layer in range(count) for path in paths]
        order += [(path, None) for path in last]
        return {
            name: ArraySpec(self._shape(path), self.arrays[path].dtype)
            for path, layer in order
            for name in self.names(path, layer)
        }

    def count(self, path: str) -> int:
        """How many layers have an array: the dense ones before the others, or those."""
        dense = self.num_dense_layers
        return dense if path.startswith(EARLY) else self.num_layers - dense

    def names(self, path: str, layer: int | None) -> tuple[str, ...]:
        """The tensors of an array: one, or one per expert; `layer` counts within its kind."""
        if layer is None:
            return (next(names.huggingface for names in naming.OUTSIDE if names.nnx == path),)
        name = self._name(path)
        experts = range(self.arrays[path].shape[0]) if _EXPERT in name else range(1)
        number = layer if path.startswith(EARLY) else layer + self.num_dense_layers
        return tuple(
            f"model.layers.{number}.{name.replace(_EXPERT, str(expert))}" for expert in experts
        )

    def of_kind(self, path: str) -> tuple[str, ...]:
        """The tensors that hold one array in all layers."""
        layers = (None,) if path in PATHS_OUTSIDE else range(self.count(path))
        return tuple(name for layer in layers for name in self.names(path, layer))

    def join(self, path: str, layer: int | None, read: Read, index: Index = ()) -> np.ndarray:
        """One array of one layer, or a part of it, put together from tensors that `read` gives."""
        shape, names = self.arrays[path].shape, self.names(path, layer)
        index = index or (slice(None),) * len(shape)
        if self.interleaved and path in _ROTATED:  # of a head its values are read together
            whole = self._joined(path, names, read, (*index[:-1], slice(None)))
            return whole[..., _interleaving(shape[-1])][..., index[-1]]
        return self._joined(path, names, read, index)

    def _joined(self, path: str, names: tuple[str, ...], read: Read, index: Index) -> np.ndarray:
        """A part of an array, without another order within a head."""
        shape = self.arrays[path].shape
        if _inner(path) in _AS_IT_IS:
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
        """The tensors that hold one array, in the order of `names`; never in the fused form."""
        if self.interleaved and path in _ROTATED:
            array = array[..., np.argsort(_interleaving(array.shape[-1]))]
        if _inner(path) in _AS_IT_IS:
            yield array
        elif self._is_stack(path):
            for expert in array:
                yield expert.T
        else:
            inputs = math.prod(array.shape[: _INPUT_AXES.get(_inner(path), 1)])
            yield array.reshape(inputs, -1).T

    def _name(self, path: str) -> str:
        """What the tensor of one array is called below `model.layers.<number>`."""
        if self.fused and path in _FUSED:
            return _FUSED[path]
        _, of_layers = naming.of_model(self.arrays)
        return next(names.huggingface for names in of_layers if names.nnx == path)

    def _is_stack(self, path: str) -> bool:
        """Whether an array here is a stack of the matrices of several experts."""
        return "feed_forward.router" in self.arrays and path in _STACKED

    def _shape(self, path: str) -> tuple[int, ...]:
        """The shape of each tensor that holds an array; kernels are `[out, in]`."""
        shape = self.arrays[path].shape
        if _inner(path) in _AS_IT_IS:
            return shape
        if self._is_stack(path):
            experts, inputs, outputs = shape
            if not self.fused:
                return outputs, inputs
            halves = 1 if path.endswith("down") else 2
            return experts, halves * outputs, inputs
        inputs = math.prod(shape[: _INPUT_AXES.get(_inner(path), 1)])
        return math.prod(shape) // inputs, inputs

    def _of_expert(
        self, path: str, names: tuple[str, ...], expert: int, read: Read
    ) -> Callable[[Index], np.ndarray]:
        """A function that reads parts of one expert's kernel, `[out, in]`."""
        if not self.fused:
            return lambda index: read(names[expert], index)
        outputs = self.arrays[path].shape[2]
        # In their shared tensor the rows of gate come first, then those of up.
        start = outputs if path.endswith("up") else 0

        def read_fused(index: Index) -> np.ndarray:
            rows = range(outputs)[index[0]]
            cut = slice(start + rows.start, start + rows.stop)
            row: np.ndarray = read(names[0], (slice(expert, expert + 1), cut, *index[1:]))[0]
            return row

        return read_fused


def _inner(path: str) -> str:
    return path.removeprefix(EARLY)


def is_fused(names: Mapping[str, object]) -> bool:
    """Whether a model with tensors of these names has the experts of a layer in two."""
    return any(name.endswith(_FUSED["feed_forward.gate"]) for name in names)


def _interleaving(head_dim: int) -> np.ndarray:
    """The place of each value of a head, from pairs of neighbours to pairs of halves."""
    return np.arange(head_dim).reshape(2, -1).T.reshape(-1)


def _kernel(
    path: str, read: Callable[[Index], np.ndarray], index: Index, shape: tuple[int, ...]
) -> np.ndarray:
    """A part of a kernel of this shape, from its tensor `[out, in]`, of which `read` gives any."""
    axes = _INPUT_AXES.get(_inner(path), 1)
    chosen = [len(range(size)[cut]) for cut, size in zip(index, shape, strict=True)]
    inputs, outputs = _rows(index[:axes], shape[:axes]), _rows(index[axes:], shape[axes:])
    # A slice of the first axis of a group is a contiguous range of the tensor, and only that is
    # read; the other axes are cut in memory.
    flat = read((outputs, inputs)).T
    kernel = flat.reshape(chosen[0], *shape[1:axes], chosen[axes], *shape[axes + 1 :])
    rest = (slice(None) if axis in (0, axes) else cut for axis, cut in enumerate(index))
    cut: np.ndarray = kernel[tuple(rest)]
    return cut


def _rows(index: Index, shape: tuple[int, ...]) -> slice:
    """The rows of a flattened group of axes that the slice of its first axis selects."""
    chosen, inner = range(shape[0])[index[0]], math.prod(shape[1:])
    return slice(chosen.start * inner, chosen.stop * inner)


def _stack(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
    """A stack of arrays of one shape, with one of them in memory beside it."""
    first = next(parts)
    stack = np.empty((count, *first.shape), first.dtype)
    stack[0] = first
    for number, part in enumerate(parts, start=1):
        stack[number] = part
    return stack
