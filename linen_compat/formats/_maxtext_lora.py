"""Adapters of MaxText: Orbax checkpoints of the two matrices of LoRA beside each kernel.

A kernel `[*inputs, *outputs]` grows by A · B · alpha / rank. MaxText stores them in two ways:

- for its server, `lora_a.kernel` is `[*inputs, rank]` and `lora_b.kernel` is `[rank, *outputs]`,
  and the layers of a scanned stack are on the second axis;
- in training by Qwix, `kernel_lora_a` is `[inputs, rank]` and `kernel_lora_b` is `[rank, outputs]`,
  with one axis for all inputs and one for all outputs. The layers are on the second axis or on the
  first, as the version of MaxText has it, which the shapes tell.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linen_compat.formats._names import Names, check_one_kind, input_axes, of_model
from linen_compat.formats._orbax.arrays import StoredArrays
from linen_compat.formats._orbax.chunks import Index
from linen_compat.formats._orbax.inspect import find_items
from linen_compat.formats._orbax.layouts import SCAN_AXIS, SCANNED, UNSCANNED, TreeLayout
from linen_compat.formats._orbax.leaves import LORA, Leaf, Leaves, leaves_of
from linen_compat.formats._orbax.stream import scale_in_maxtext
from linen_compat.formats._shapes import model_arrays
from linen_compat.formats._streams import ArraySpec, Mismatch, is_float
from linen_compat.formats.huggingface._peft import (
    CONFIG,
    PATTERNS,
    check_number,
    checked_values,
    is_target,
)
from linen_compat.formats.huggingface.config import read_json
from linen_compat.maxtext._families import check_maxtext
from nnx_pipeline import InputError
from nnx_pipeline.config.model import ModelConfig
from nnx_pipeline.lab._files import place
from nnx_pipeline.lab.errors import counted, shown

_At = tuple[int | slice, ...]
_OF_STEP = "_CHECKPOINT_METADATA"
_MATRIX = re.compile(r"(.+/)(?:lora_([ab])\.(kernel)|(\w+)_lora_([ab]))")


@dataclass(frozen=True)
class _Pair:
    """The two matrices of a kernel, or of a stack of the kernels of all layers."""

    a: Leaf
    b: Leaf
    is_served: bool


@dataclass(frozen=True)
class _Kernel:
    """The names of a kernel and the layers that have it; None is outside of them."""

    names: Names
    layers: tuple[int | None, ...]
    is_stack: bool = False


class MaxTextAdapter:
    """An adapter that MaxText wrote, by the names of the kernels that it changes.

    Raises InputError where rank and alpha are missing or are used in another way than MaxText's,
    and Mismatch for a matrix without its second one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = place(folder)
        self.items = find_items(folder)
        self._leaves = leaves_of(self.items)[LORA]
        if not self._leaves:
            raise InputError(
                f"{self.items} holds no matrices of LoRA (lora_a.kernel and lora_b.kernel, or "
                "kernel_lora_a and kernel_lora_b); give an adapter as MaxText or PEFT saves it"
            )
        self.pairs = _pairs(self._leaves, self.items)
        self.stated_in, self.values = self._stated()
        self.rank, self.scale = self.values["r"], self.values["lora_alpha"] / self.values["r"]
        self._read_a, self._read_b = StoredArrays(self.items), StoredArrays(self.items)

    @property
    def specs(self) -> Mapping[str, ArraySpec]:
        """Shape and dtype of each matrix of the adapter."""
        return {leaf.stored: leaf.spec for leaf in self._leaves.values()}

    @property
    def files(self) -> list[Path]:
        return [*self.items.glob("**/*"), self.stated_in]

    def read(self, name: str) -> np.ndarray:
        """A matrix, or a stack of them, in float32."""
        return self._read_a.read(name).astype(np.float32)

    def matrices(self, pair: _Pair, index: _At) -> tuple[np.ndarray, ...]:
        """A and B of one layer, in float32; each has a reader that keeps its whole stack open."""
        a, b = self._read_a.read(pair.a.stored, index), self._read_b.read(pair.b.stored, index)
        return a.astype(np.float32), b.astype(np.float32)

    def _stated(self) -> tuple[Path, dict[str, Any]]:
        """The file that states rank and alpha, and its values by the names of PEFT."""
        metadata = self.items.parent / _OF_STEP
        of_step = self._of_step(metadata)
        # Beside the step, whose arrays are in a folder of their own or in the step itself.
        beside = self.items.parents[: 2 if self.items.name == "items" else 1]
        for folder in (self.folder, *beside):
            if (file := folder / CONFIG).is_file():
                values = checked_values(file)
                both = {**of_step, **{key: values[key] for key in of_step if key in values}}
                if of_step and both != of_step:
                    raise InputError(
                        f"{file} says r={both['r']} and lora_alpha={both['lora_alpha']}, and "
                        f"{metadata} {of_step['r']} and {of_step['lora_alpha']}; remove the one "
                        "that is wrong"
                    )
                for key in ("use_rslora", *PATTERNS):
                    if values.get(key):
                        raise InputError(
                            f"{file}: {key}={shown(values[key])} is not supported in an adapter of "
                            "MaxText, which multiplies by lora_alpha / r; give PEFT's own adapter"
                        )
                return file, dict(values)
        if of_step:
            return metadata, of_step
        raise InputError(
            f"{self.folder} does not say rank and alpha of the adapter (no {CONFIG} in it, no lora "
            f"in {_OF_STEP}); write those of its training to {self.folder / CONFIG} as r and "
            "lora_alpha"
        )

    def _of_step(self, file: Path) -> dict[str, Any]:
        """Rank and alpha in the metadata of the step by the names of PEFT; {} without them."""
        custom = read_json(file).get("custom_metadata") if file.is_file() else None
        stated = custom.get("lora") if isinstance(custom, dict) else None
        if not stated:
            return {}
        given = stated if isinstance(stated, dict) else {}
        values = {"r": given.get("lora_rank"), "lora_alpha": given.get("lora_alpha")}
        for key, value in values.items():
            check_number(file, key, value)
        return values


class MaxTextChanges:
    """What an adapter of MaxText makes of the arrays of a model.

    They are arranged as a MaxText model of the same config has them, with its attention `scale`.
    """

    def __init__(self, adapter: MaxTextAdapter, model: ModelConfig) -> None:
        self._adapter, self._arrays = adapter, model_arrays(model)
        self.scale = scale_in_maxtext(self._arrays)
        self._places: dict[tuple[str, int | None], tuple[_Pair, _At]] = {}
        self.problems = [*_not_in_maxtext(model)]
        kernels = _kernels(model, self._arrays)
        for name, pair in adapter.pairs.items():
            if (kernel := kernels.get(name)) is None:
                self.problems.append(
                    f"{pair.a.stored} of the adapter is for {name}, which is no kernel of a model "
                    f"of this config with {counted(model.num_layers, 'layer')}; give the adapter "
                    "of this model, or the config of its own"
                )
            elif problem := self._add(pair, kernel):
                self.problems.append(f"{problem}; give the adapter of this model")
        self.problems += [] if self.problems else self._without_layers(kernels)

    def new(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        """Nothing takes the place of another array."""

    def grown(self, path: str, layer: int | None, index: Index) -> np.ndarray | None:
        """What a part of an array grows by, in float32; None where it stays as it is."""
        if (path, layer) not in self._places:
            return None
        pair, at = self._places[path, layer]
        shape, axes, rank = self._arrays[path].shape, input_axes(path), self._adapter.rank
        index = index or (slice(None),) * len(shape)
        a, b = self._adapter.matrices(pair, at)
        a = a.reshape(*shape[:axes], rank)[(*index[:axes], slice(None))]
        b = b.reshape(rank, *shape[axes:])[(slice(None), *index[axes:])]
        return np.tensordot(a, b, 1) * np.float32(self._adapter.scale)

    def _add(self, pair: _Pair, kernel: _Kernel) -> str:
        """Notes where the matrices of a kernel are; else says what is wrong with them."""
        adapter, names = self._adapter, kernel.names
        module = f"model.layers.{kernel.layers[0]}.{names.huggingface.removesuffix('.weight')}"
        modules = (module, names.linen.removesuffix("/kernel").replace("/", "."))
        targets = adapter.values.get("target_modules")
        if not any(is_target(targets, one) for one in modules):
            return f"{pair.a.stored} is not among the target_modules of {adapter.stated_in}"
        for leaf in (pair.a, pair.b):
            if not is_float(leaf.spec.dtype):
                return f"{leaf.stored} is {leaf.dtype}, but matrices must be floating-point"
        if pair.a.shape[-1:] != (adapter.rank,):
            return (
                f"{pair.a.stored} is {[*pair.a.shape]} and not of rank {adapter.rank}, as "
                f"{adapter.stated_in} says"
            )
        axes = [SCAN_AXIS] if pair.is_served or not kernel.is_stack else [SCAN_AXIS, 0]
        expected = {axis: self._shapes(pair, kernel, axis) for axis in axes}
        found = pair.a.shape, pair.b.shape
        fitting = [axis for axis in axes if expected[axis] == found]
        if len(fitting) == 2:
            return f"{pair.a.stored} is {[*pair.a.shape]}, which does not tell the axis of layers"
        if not fitting:
            shapes = (
                " and ".join(str([*x]) for x in both) for both in (found, expected[SCAN_AXIS])
            )
            return (
                f"{pair.a.stored} and its B are {next(shapes)} instead of {next(shapes)} for "
                f"{counted(len(kernel.layers), 'layer')}"
            )
        if any((names.nnx, layer) in self._places for layer in kernel.layers):
            return f"{pair.a.stored} is for layers that other matrices of the adapter are for too"
        for number, layer in enumerate(kernel.layers):
            at: _At = (*(slice(None),) * fitting[0], number) if kernel.is_stack else ()
            self._places[names.nnx, layer] = pair, at
        return ""

    def _without_layers(self, kernels: Mapping[str, _Kernel]) -> Iterator[str]:
        """A line for each kernel that lacks matrices in some layers, as for another model."""
        changed = (kernels[name].names for name in self._adapter.pairs)
        for names in {names.nnx: names for names in changed}.values():
            alike = [kernel for kernel in kernels.values() if kernel.names == names]
            layers = {layer for kernel in alike for layer in kernel.layers}
            found = [layer for layer in layers if (names.nnx, layer) in self._places]
            if len(found) < len(layers):
                yield (
                    f"{names.linen} has matrices in {counted(len(found), 'layer')} of the adapter, "
                    f"and the model has {len(layers)}; give the adapter of this model"
                )

    def _shapes(
        self, pair: _Pair, kernel: _Kernel, axis: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes that A and B must have, with the layers of a stack on this axis."""
        shape, axes = self._arrays[kernel.names.nnx].shape, input_axes(kernel.names.nnx)
        inputs, outputs = shape[:axes], shape[axes:]
        if not pair.is_served:
            inputs, outputs = (math.prod(inputs),), (math.prod(outputs),)
        a, b = (*inputs, self._adapter.rank), (self._adapter.rank, *outputs)
        if kernel.is_stack:
            layers = (len(kernel.layers),)
            a, b = ((*x[:axis], *layers, *x[axis:]) for x in (a, b))
        return a, b


def _pairs(leaves: Leaves, items: Path) -> dict[str, _Pair]:
    """The matrices by the name of their kernel, in which each layer of a list has its number."""
    halves: dict[tuple[str, bool], dict[str, Leaf]] = {}
    for name, leaf in leaves.items():
        match = _MATRIX.fullmatch(name)
        assert match, "the group LORA has such names alone"
        module, served, kernel, parameter, trained = match.groups()
        whole = re.sub(r"^(decoder/\w*layers)/(\d+)/", r"\1_\2/", module) + (kernel or parameter)
        half = halves.setdefault((whole, bool(served)), {})
        if (letter := served or trained) in half:
            raise Mismatch(
                f"{whole} in {items} has matrices twice, as {leaf.stored} and "
                f"{half[letter].stored}; take away those that are wrong"
            )
        half[letter] = leaf
    pairs: dict[str, _Pair] = {}
    for (whole, served), parts in halves.items():
        if parts.keys() != {"a", "b"}:
            raise Mismatch(
                f"{next(iter(parts.values())).stored} in {items} has no second matrix; "
                "take a whole copy of the adapter"
            )
        if whole in pairs:
            raise Mismatch(f"{whole} in {items} has matrices twice, of MaxText's server and Qwix")
        pairs[whole] = _Pair(parts["a"], parts["b"], served)
    return pairs


def _kernels(model: ModelConfig, arrays: Mapping[str, ArraySpec]) -> dict[str, _Kernel]:
    """The kernels of a model by their names in MaxText, with layers in a stack and apart."""
    outside, of_layers = of_model(arrays)
    kernels = {names.linen: _Kernel(names, (None,)) for names in outside}
    for format in (SCANNED, UNSCANNED):
        layout = TreeLayout(format, model.num_layers, num_dense_layers=model.num_dense_layers)
        for names in of_layers:
            layers = range(layout.count(names))
            apart = [tuple(layers)] if format == SCANNED else [(layer,) for layer in layers]
            for some in apart:
                kernel = _Kernel(names, some, format == SCANNED)
                kernels[layout.slot(names, some[0]).leaf] = kernel
    return {name: kernel for name, kernel in kernels.items() if name.endswith("/kernel")}


def _not_in_maxtext(model: ModelConfig) -> Iterator[str]:
    """Why MaxText has no adapter for a model, if it has none."""
    try:
        check_one_kind(model, "an adapter of MaxText")
        check_maxtext(model)
    except InputError as error:
        yield str(error)
