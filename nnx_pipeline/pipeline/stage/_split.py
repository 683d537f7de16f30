"""Sends the batch of a layer through it in parts, whose work a compiler may then interleave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_pipeline.lab.errors import counted, is_divisor
from nnx_pipeline.pipeline.metrics import Max, MicrobatchMean, Sum, is_metric
from nnx_pipeline.sharding.layout import P, is_explicit


@dataclass(frozen=True)
class BatchSplit:
    """How each device cuts the sequences of a layer's call into parts."""

    # No part waits for another: while one waits for a collective, such as the all-to-all of
    # experts, another computes.
    parts: int
    devices: int
    whole: frozenset[str]

    def __call__(self, layer: Callable[..., PyTree], x: PyTree, **side: PyTree) -> PyTree:
        """What `layer(x, **side)` returns, computed part by part."""
        xs = self._cut(x)
        sides: list[dict[str, PyTree]] = [{} for _ in xs]
        for name, value in side.items():
            values = [value] * self.parts if name in self.whole else self._cut(value)
            for at, part in enumerate(values):
                sides[at][name] = part
        results = [layer(part, **besides) for part, besides in zip(xs, sides, strict=True)]
        if not all(isinstance(result, tuple) and len(result) == 2 for result in results):
            return results[0]  # the caller says what is wrong with it
        outputs, metrics = zip(*results, strict=True)
        return self._joined(outputs), self._metrics(metrics)

    def _cut(self, tree: PyTree) -> list[PyTree]:
        leaves, structure = jax.tree.flatten(tree)
        parts = [self._parts_of(leaf) for leaf in leaves]
        return [
            jax.tree.unflatten(structure, [each[at] for each in parts]) for at in range(self.parts)
        ]

    def _parts_of(self, leaf: Array) -> list[Array]:
        local = leaf.shape[0] // self.devices
        rule = (
            f"a device has {counted(local, 'sequence')} of a call of a layer, which "
            f"pipeline.batch_split={self.parts} does not divide"
        )
        is_divisor(self.parts, local, rule=rule)
        small, same = local // self.parts, leaf.ndim - 1
        cut = _reshaped(leaf, (self.devices, self.parts, small), same)
        return [_reshaped(cut[:, at], (self.devices * small,), same) for at in range(self.parts)]

    def _joined(self, trees: Sequence[PyTree]) -> PyTree:
        def joined(*parts: Array) -> Array:
            small, same = parts[0].shape[0] // self.devices, parts[0].ndim - 1
            by_device = [_reshaped(part, (self.devices, small), same) for part in parts]
            every = jnp.concatenate(by_device, axis=1)
            return _reshaped(every, (every.shape[0] * every.shape[1],), same)

        return jax.tree.map(joined, *trees)

    def _metrics(self, trees: Sequence[PyTree]) -> PyTree:
        def combined(*parts: PyTree) -> PyTree:
            if isinstance(parts[0], MicrobatchMean):
                rows = self._joined([part.rows for part in parts])
                return MicrobatchMean(rows, parts[0].function)
            if not is_metric(parts[0]):
                return parts[0]  # the caller refuses it
            add = jnp.maximum if isinstance(parts[0], Max) else jnp.add
            value = reduce(add, [part.value for part in parts])
            is_mean = not isinstance(parts[0], Max | Sum)
            return type(parts[0])(value / self.parts if is_mean else value)

        return jax.tree.map(combined, *trees, is_leaf=is_metric)


def _reshaped(x: Array, leading: tuple[int, ...], same: int) -> Array:
    """Other leading axes, the first on the same devices; the last `same` axes stay."""
    shape = (*leading, *x.shape[x.ndim - same :])
    if not is_explicit():
        return x.reshape(shape)
    spec = jax.typeof(x).sharding.spec
    rest = spec[x.ndim - same :]
    out = P(spec[0], *[None] * (len(leading) - 1), *rest)
    return jax.lax.reshape(x, shape, out_sharding=out)
