"""Which tensors of a Hugging Face model hold each array of this project, and in which layout.

Kernels are `[out, in]` there; here they are `[in, out]`, with one axis for the heads and one for
the dimensions of a head. Experts are tensors of their own there and one stack here.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from linen_compat.formats import _names as naming
from linen_compat.formats._names import EARLY, PATHS_OUTSIDE
from linen_compat.formats._streams import ArraySpec
from linen_compat.formats._transpose import copy_into

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
    *(names.nnx for names in naming.POST_NORMS),
    *("attention.kv_norm.scale", naming.ROUTER_BIAS.nnx, naming.SINKS.nnx),
    naming.EXPERT_BIASES[0].nnx,
)
# They have one axis there, and here one for heads and one for the dimensions of a head.
_FLAT = (*(names.nnx for names in naming.BIASES), *_NORMS_OF_HEADS)
# Their last axis is head_dim.
_ROTATED = ("attention.query", "attention.key", *_FLAT[:2], *_NORMS_OF_HEADS)
_OF_EXPERTS = tuple(names.nnx for names in naming.EXPERT_BIASES[1:])
_STACKED = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
_EXPERT = "<expert>"


@dataclass(frozen=True)
class Tensors:
    """The names and shapes of the tensors of a Hugging Face model with these arrays.

    - `names_of_class`: those of a layer's tensors, by NNX path, where they differ from the usual.
      Arrays with the same name have its rows one after the other, in this order.
    - `fused`: whether the experts of a layer are in two tensors, `[experts, out, in]`.
    - `by_columns`: see `Architecture`.
    - `interleaved`: whether the arrays are for `ModelConfig.rope_interleaved`, where a model of
      transformers has halves. With latent attention both sides have the same order.
    """

    arrays: Mapping[str, ArraySpec]
    num_layers: int
    num_dense_layers: int = 0
    names_of_class: Mapping[str, str] = field(default_factory=dict)
    fused: bool = False
    interleaved: bool = False
    by_columns: bool = False

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

    def join(self, path: str, names: tuple[str, ...], read: Read, index: Index = ()) -> np.ndarray:
        """One array, or a part of it, put together from the tensors `names` that `read` gives."""
        shape = self.arrays[path].shape
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
        if self._is_by_columns(path):
            *before, cut = index
            columns, (first, step) = range(shape[-1])[cut], self._turn(path)
            wide = slice(step * columns.start, step * columns.stop)
            return read(names[0], (*before, wide))[..., first::step]
        if _inner(path) in _FLAT:
            return _unflattened(read, names[0], index, shape)
        if not self._is_stack(path):
            return _kernel(path, self._of_rows(path, names[0], read), index, shape)
        experts = range(shape[0])[index[0]]
        parts = (
            _kernel(path, self._of_expert(path, names, expert, read), index[1:], shape[1:])
            for expert in experts
        )
        return _stack(parts, len(experts))

    def split(self, path: str, array: np.ndarray) -> Iterator[np.ndarray]:
        """The tensors, or their rows, that hold one array, in the order of `names`."""
        if self.interleaved and path in _ROTATED:
            array = array[..., np.argsort(_interleaving(array.shape[-1]))]
        if _inner(path) in _AS_IT_IS or self._is_by_columns(path):
            yield array
        elif _inner(path) in _FLAT:
            yield array.reshape(-1)
        elif self._is_stack(path):
            if _EXPERT not in self._name(path):
                yield np.swapaxes(array, 1, 2)
                return
            for expert in array:
                yield expert.T
        else:
            inputs = math.prod(array.shape[: naming.input_axes(path)])
            yield array.reshape(inputs, -1).T

    def _name(self, path: str) -> str:
        """What the tensor of one array is called below `model.layers.<number>`."""
        if path in self._joint:
            return self._joint[path]
        _, of_layers = naming.of_model(self.arrays)
        return next(names.huggingface for names in of_layers if names.nnx == path)

    def _is_by_columns(self, path: str) -> bool:
        return self.by_columns and path in (*_STACKED, *_OF_EXPERTS)

    def _turn(self, path: str) -> tuple[int, int]:
        """The first column of an array in its tensor, and from one to the next."""
        same = [other for other, name in self._joint.items() if name == self._joint[path]]
        return same.index(path), len(same)

    def place(self, path: str) -> Index:
        """The part of its tensor that an array is; empty for the whole."""
        if self._is_by_columns(path):
            first, step = self._turn(path)
            return () if step == 1 else (slice(first, None, step),)
        start = self.first_row(path)
        if self._outputs(path) == self._all_outputs(path):
            return ()
        return (slice(start, start + self._outputs(path)), slice(None))

    @property
    def _joint(self) -> Mapping[str, str]:
        return _FUSED if self.fused else self.names_of_class

    def first_row(self, path: str) -> int:
        """Where the rows of an array begin in its tensor, which may hold other arrays too."""
        if path not in self._joint:
            return 0
        same = [other for other, name in self._joint.items() if name == self._joint[path]]
        return sum(map(self._outputs, same[: same.index(path)]))

    def _outputs(self, path: str) -> int:
        """How many rows one array has in a tensor `[…, out, in]`."""
        shape = self.arrays[path].shape
        if self._is_stack(path):
            return shape[-1]
        return math.prod(shape[naming.input_axes(path) :])

    def _all_outputs(self, path: str) -> int:
        """How many rows its tensor has."""
        if path not in self._joint:
            return self._outputs(path)
        name = self._joint[path]
        return sum(self._outputs(other) for other, of in self._joint.items() if of == name)

    def _is_stack(self, path: str) -> bool:
        """Whether an array here is a stack of the matrices of several experts."""
        return "feed_forward.router" in self.arrays and path in _STACKED

    def _shape(self, path: str) -> tuple[int, ...]:
        """The shape of each tensor that holds an array; kernels are `[out, in]`."""
        shape = self.arrays[path].shape
        if _inner(path) in _AS_IT_IS:
            return shape
        if _inner(path) in _FLAT:
            return (math.prod(shape),)
        if self._is_by_columns(path):
            return (*shape[:-1], shape[-1] * self._turn(path)[1])
        outputs = self._all_outputs(path)
        if self._is_stack(path):
            whole = (shape[0],) if _EXPERT not in self._name(path) else ()
            return *whole, outputs, shape[1]
        return outputs, math.prod(shape[: naming.input_axes(path)])

    def _of_rows(self, path: str, name: str, read: Read) -> Callable[[Index], np.ndarray]:
        """A function that reads parts of one array's rows of a tensor `[…, out, in]`."""
        start, outputs = self.first_row(path), self._outputs(path)

        def read_rows(index: Index) -> np.ndarray:
            *before, cut, columns = index
            rows = range(outputs)[cut]
            return read(name, (*before, slice(start + rows.start, start + rows.stop), columns))

        return read_rows

    def _of_expert(
        self, path: str, names: tuple[str, ...], expert: int, read: Read
    ) -> Callable[[Index], np.ndarray]:
        """A function that reads parts of one expert's kernel, `[out, in]`."""
        if _EXPERT in self._name(path):
            return lambda index: read(names[expert], index)
        of_all = self._of_rows(path, names[0], read)

        def read_one(index: Index) -> np.ndarray:
            one: np.ndarray = of_all((slice(expert, expert + 1), *index))[0]
            return one

        return read_one


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
    axes = naming.input_axes(path)
    chosen = [len(range(size)[cut]) for cut, size in zip(index, shape, strict=True)]
    inputs, outputs = _rows(index[:axes], shape[:axes]), _rows(index[axes:], shape[axes:])
    # A slice of the first axis of a group is a contiguous range of the tensor, and only that is
    # read; the other axes are cut in memory.
    flat = read((outputs, inputs)).T
    kernel = flat.reshape(chosen[0], *shape[1:axes], chosen[axes], *shape[axes + 1 :])
    rest = (slice(None) if axis in (0, axes) else cut for axis, cut in enumerate(index))
    cut: np.ndarray = kernel[tuple(rest)]
    return cut


def _unflattened(read: Read, name: str, index: Index, shape: tuple[int, ...]) -> np.ndarray:
    """A part of an array of this shape, from a tensor that has all its axes in one."""
    flat = read(name, (_rows(index, shape),))
    part: np.ndarray = flat.reshape(-1, *shape[1:])[(slice(None), *index[1:])]
    return part


def _rows(index: Index, shape: tuple[int, ...]) -> slice:
    """The rows of a flattened group of axes that the slice of its first axis selects."""
    chosen, inner = range(shape[0])[index[0]], math.prod(shape[1:])
    return slice(chosen.start * inner, chosen.stop * inner)


def _stack(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
    """A stack of arrays of one shape, with one of them in memory beside it."""
    first = next(parts)
    stack = np.empty((count, *first.shape), first.dtype)
    copy_into(stack[0], first)
    for number, part in enumerate(parts, start=1):
        copy_into(stack[number], part)
    return stack
