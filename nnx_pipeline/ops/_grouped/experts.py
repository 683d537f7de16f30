"""A mixture of experts in which each token is computed by the experts that were chosen for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from nnx_pipeline.config._remat import Remat
from nnx_pipeline.lab.errors import is_divisor
from nnx_pipeline.ops._by_choice import CloseResiduals, OnDevices, OpenResiduals
from nnx_pipeline.ops._experts import Choice, ExpertKernels, Mixed, Tokens
from nnx_pipeline.ops._grouped import order as sorting
from nnx_pipeline.ops._grouped.products import GroupedProducts, products_for
from nnx_pipeline.sharding._cast import cast_at_use
from nnx_pipeline.sharding.layout import Layout, P

MANY = 64  # experts of a device whose kernels together are large beside all else that it holds


@dataclass(frozen=True)
class GroupedExperts:
    """Σ over the chosen experts of weight · (silu(x · gate_e) · (x · up_e)) · down_e.

    Each device sorts the choices of its tokens by expert, and multiplies the rows of each expert by
    that expert's kernels. No token is dropped: the work is the active parameters', but for rows
    that fill up a tile.

    Where experts are sharded over the mesh axis `expert`, each device along it computes its own
    experts for the tokens of all, which it gathers; the results are scattered back. That sends each
    token once to each device, as an exchange that must not drop any has to be ready for. The rows
    are then of all these tokens, and so is the memory; kernels skip rows of other devices.

    How many rows are multiplied is known when the program runs. Estimates from the program take
    each expert to have as many as the others.

    Kernels of `group` experts are gathered, and multiplied, at a time, in a scan. A small group
    saves memory, for their gradients too. It takes time: gathers wait for the group before, and
    JAX's kernels work out anew which rows are whose. For Mixtral 8x7B on 64 TPU v5p (libtpu
    0.0.42.1) groups of 8, 4, 2 and 1 take 13.5, 11.8, 11.3 and 11.3 GB of temp, and by estimate
    2.71, 3.15, 3.19 and 3.41 s.

    Without `group` all experts are computed at once. Of `MANY` that are sharded over embed too, the
    kernels gate and up are not held together: one is gathered again for the backward pass. On 8
    TPU v5p two layers of Qwen3-30B-A3B and three of DeepSeek-V2-Lite take 8 and 11 % less heap for
    3 % more time by estimate; with 1,024 tokens on each of 4, the former take 2 % less for 4 %. A
    `group` of all experts holds both. With the 8 of Mixtral 8x7B it depends on the rest of the
    program: 12 % less in four stages, and 10 % more in two layers on 4 chips.
    """

    group: int | None = None
    tiles: tuple[int, ...] | None = None
    activation: str = "silu"

    def __call__(
        self, x: Tokens, choice: Choice, kernels: ExpertKernels, *, layout: Layout, remat: Remat
    ) -> Mixed:
        """As `DenseExperts`; raises InputError where devices of an expert share tokens."""
        del remat  # what a layer keeps of the hidden units is decided by their names
        weights, experts = choice
        tokens = x.shape[0] * x.shape[1] // layout.size("batch_beside_experts")
        rows, (every, *_) = tokens * experts.shape[-1], kernels.gate.shape
        local = every // layout.size("expert")
        group = self.group or local
        rule = f"model.expert_group={group} does not divide the {local} experts of a device"
        is_divisor(group, local, rule=rule)
        products = products_for(rows, self.tiles, share=every // group)
        more = {"products": products, "group": group, "activation": self.activation}
        again = self.group is None and local >= MANY and bool(layout.axes("embed_of_expert"))
        grouped = _OnDevice.of("grouped", every, layout, gather_again=again, **more)
        order = grouped.sort(experts)
        # Cast here, kernels have gradients in the dtype of the model; adding them up casts to the
        # dtype of the parameters.
        kernels = ExpertKernels(*(cast_at_use(kernel, x.dtype) for kernel in kernels))
        return Mixed(grouped.mix(x, order, weights, kernels))


class _Groups(NamedTuple):
    """Some experts of a device, or all, which add their rows to `results` of all experts."""

    products: GroupedProducts
    sizes: Array
    some: sorting.Some | None = None
    results: list[Array] | None = None

    def product(self, slot: int, rows: Array, kernels: Array, *, transposed: bool = False) -> Array:
        """The rows times their kernels; they belong to the result number `slot`."""
        into = None
        if self.some is not None and self.results is not None:
            into = jnp.int32(self.some.first), self.results[slot]
        return self.products.product(rows, kernels, self.sizes, into, transposed=transposed)

    def outer(self, left: Array, right: Array) -> Array:
        return self.products.outer(left, right, self.sizes, self.some)


_OfGroup = tuple[list[Array], tuple[Array, ...]]  # results of rows, and gradients of kernels or ()
OfSome = Callable[..., _OfGroup]  # (the group, its kernels)


@dataclass(frozen=True, kw_only=True)
class _OnDevice(OnDevices):
    """What a device computes for its own tokens; arrays of rows are `[devices, rows, …]`."""

    products: GroupedProducts
    group: int
    gather_again: bool

    @property
    def rows(self) -> P:
        """The sharding of hidden units, `[devices, rows, mlp]`."""
        return P(self.batch or None, None, self.mlp or None)

    @property
    def orders(self) -> tuple[P, P, P]:
        """The sharding of the arrays of an `Order`, which have an axis of devices."""
        batch = self.batch or None
        return P(batch, None), P(batch, None, None), P(batch, None)

    def sort(self, experts: Int[Array, "batch seq chosen"]) -> sorting.Order:
        """The order of the choices on each device; its arrays have an axis of devices."""

        def local(experts: Array) -> tuple[Array, ...]:
            mine = jax.lax.axis_index(self.owners) if self.owners else 0
            order = sorting.sort_by_expert(
                _flat(self.from_owners(experts)),
                first=mine * self.local_experts,
                count=self.local_experts,
                tile=self.products.multiple,
            )
            return tuple(leaf[None] for leaf in order)

        return sorting.Order(*self.per_device(local, [self.tokens], self.orders)(experts))

    def by_group(self, some: OfSome, order: sorting.Order, kernels: tuple[Array, ...]) -> _OfGroup:
        """The results of one group after the other, and the gradients of their kernels."""
        steps = self.local_experts // self.group
        if steps == 1:  # there is nothing to add to
            return some(_Groups(self.products, order.sizes), *kernels)

        def step(results: list[Array], now: tuple[Array, tuple[Array, ...]]) -> _OfGroup:
            number, kernels_of = now
            groups = sorting.Some(number * self.group, self.group)
            return some(_Groups(self.products, order.sizes, groups, results), *kernels_of)

        split = tuple(kernel.reshape(steps, -1, *kernel.shape[1:]) for kernel in kernels)
        first = [kernel[0] for kernel in split]
        made, _ = jax.eval_shape(partial(some, _Groups(self.products, order.sizes)), *first)
        start = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in made]
        now = (jnp.arange(steps, dtype=jnp.int32), split)
        results, gradients = jax.lax.scan(step, start, now)
        return results, tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in gradients)

    def from_owners(self, x: Array) -> Array:
        """What all devices that share the experts have, `[batch, …]`: an all-gather."""
        return jax.lax.all_gather(x, self.owners, axis=0, tiled=True) if self.owners else x

    def to_owners(self, y: Array, like: Array) -> Array:
        """Adds up parts `[tokens, …]` and leaves each device its own: a reduce-scatter."""
        y = self.over_parts(y).reshape(-1, like.shape[1], y.shape[-1])
        if self.owners:
            y = jax.lax.psum_scatter(y, self.owners, scatter_dimension=0, tiled=True)
        return y.astype(like.dtype)

    def open(
        self, x: Array, places: sorting.Order, gate: Array, up: Array
    ) -> tuple[tuple[Array, Array], OpenResiduals]:
        def local(x: Array, *rest: Array) -> tuple[Array, ...]:
            order, kernels = _mine(rest[:3]), rest[3:]
            rows = sorting.to_rows(_flat(self.from_owners(x)), order)

            def some(groups: _Groups, *kernels: Array) -> _OfGroup:
                whole = (self.gathered(kernel, 1) for kernel in kernels)
                return [groups.product(slot, rows, leaf) for slot, leaf in enumerate(whole)], ()

            return tuple(rows[None] for rows in self.by_group(some, order, kernels)[0])

        specs = [self.tokens, *self.orders, self.into, self.into]
        opened, raised = self.per_device(local, specs, [self.rows] * 2)(x, *places, gate, up)
        return (opened, raised), (x, places, gate, up)

    def open_back(
        self, residuals: OpenResiduals, cotangents: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        x, order, gate, up = residuals

        def local(x: Array, *rest: Array) -> tuple[Array, ...]:
            order, kernels, d_rows = _mine(rest[:3]), rest[3:5], [each[0] for each in rest[5:]]
            rows = sorting.to_rows(_flat(self.from_owners(x)), order)

            def some(groups: _Groups, *kernels: Array) -> _OfGroup:
                parts, d_kernels = list[Array](), list[Array]()
                for slot, (kernel, d_row) in enumerate(zip(kernels, d_rows, strict=True)):
                    if parts and self.gather_again:  # when the other's work is done
                        before = parts[-1], d_kernels[-1]
                        waited = jax.lax.optimization_barrier((kernel, *before))
                        kernel, parts[-1], d_kernels[-1] = waited
                    whole = self.gathered(kernel, 1)
                    parts.append(groups.product(slot, d_row, whole, transposed=True))
                    d_kernels.append(self.summed(groups.outer(rows, d_row), 1))
                return parts, tuple(d_kernels)

            (of_gate, of_up), d_kernels = self.by_group(some, order, kernels)
            return self.to_owners(sorting.from_rows(of_gate + of_up, order), x), *d_kernels

        into, rows = self.into, self.rows
        specs = [self.tokens, *self.orders, into, into, rows, rows]
        d_x, d_gate, d_up = self.per_device(local, specs, [self.tokens, into, into])(
            x, *order, gate, up, *cotangents
        )
        return d_x, d_gate, d_up

    def close(
        self, hidden: Array, weights: Array, places: sorting.Order, down: Array
    ) -> tuple[Array, CloseResiduals]:
        def local(hidden: Array, weights: Array, *rest: Array) -> tuple[Array, ...]:
            order, down = _mine(rest[:3]), rest[3]
            share = sorting.of_rows(_flat(self.from_owners(weights)), order)
            weighed = hidden[0] * share[:, None]

            def some(groups: _Groups, down: Array) -> _OfGroup:
                return [groups.product(0, weighed, self.gathered(down, 2))], ()

            (rows,), _ = self.by_group(some, order, (down,))
            return (self.to_owners(sorting.from_rows(rows, order), weights),)

        specs = [self.rows, self.tokens, *self.orders, self.down]
        (mixed,) = self.per_device(local, specs, [self.tokens])(hidden, weights, *places, down)
        return mixed, (hidden, weights, places, down)

    def close_back(self, residuals: CloseResiduals, cotangent: Array) -> tuple[Array, Array, Array]:
        hidden, weights, order, down = residuals

        def local(hidden: Array, weights: Array, *rest: Array) -> tuple[Array, ...]:
            order, down, cotangent = _mine(rest[:3]), rest[3], rest[4]
            hidden, share = hidden[0], sorting.of_rows(_flat(self.from_owners(weights)), order)
            d_rows = sorting.to_rows(_flat(self.from_owners(cotangent)), order)
            weighed = hidden * share[:, None]

            def some(groups: _Groups, down: Array) -> _OfGroup:
                part = groups.product(0, d_rows, self.gathered(down, 2), transposed=True)
                return [part], (self.summed(groups.outer(weighed, d_rows), 2),)

            (d_weighed,), (d_down,) = self.by_group(some, order, (down,))
            d_share = jnp.sum((d_weighed * hidden).astype(jnp.float32), axis=1)
            d_weights = self.to_owners(sorting.weights_of_choices(d_share, order), weights)
            d_hidden = d_weighed * share[:, None]
            return d_hidden[None], d_weights, d_down

        specs = [self.rows, self.tokens, *self.orders, self.down, self.tokens]
        outs = [self.rows, self.tokens, self.down]
        d_hidden, d_weights, d_down = self.per_device(local, specs, outs)(
            hidden, weights, *order, down, cotangent
        )
        return d_hidden, d_weights, d_down


def _flat(x: Array) -> Array:
    """`[batch, seq, …]` to `[tokens, …]`."""
    return x.reshape(-1, *x.shape[2:])


def _mine(order: tuple[Array, ...]) -> sorting.Order:
    return sorting.Order(*(leaf[0] for leaf in order))
