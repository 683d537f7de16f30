"""A mixture of experts in which each token is computed by the experts that were chosen for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nnx_pipeline.errors import is_divisor
from nnx_pipeline.ops import per_device as devices
from nnx_pipeline.ops.cast import cast_at_use
from nnx_pipeline.ops.expert_axes import ExpertAxes
from nnx_pipeline.ops.experts import ExpertKernels, Mixed, as_it_is
from nnx_pipeline.ops.grouped.order import (
    Order,
    Some,
    from_rows,
    of_choices,
    of_rows,
    sort_by_expert,
    to_rows,
)
from nnx_pipeline.ops.grouped.products import GroupedProducts, products_for
from nnx_pipeline.remat import HIDDEN, Remat, named
from nnx_pipeline.sharding import Layout, P

# Its functions are differentiated by hand, once.
per_device = partial(
    devices.per_device,
    refusal="grouped experts have first derivatives in reverse mode only; "
    "set model.experts='dense' for second derivatives and for forward mode",
)


@dataclass(frozen=True)
class GroupedExperts:
    """Σ over the chosen experts of weight · (silu(x · gate_e) · (x · up_e)) · down_e.

    Each device sorts the choices of its tokens by expert, and multiplies the rows of each expert by
    that expert's kernels. No token is dropped, and none is computed by an expert that was not
    chosen for it, so the work is that of the active parameters, but for rows that fill up a tile.
    The number of rows is that of all choices, however they are spread over the experts.

    Where experts are sharded over the mesh axis `expert`, each device along it computes its own
    experts for the tokens of all, which it gathers; the results are scattered back. That sends each
    token once to each device, as an exchange that must not drop any has to be ready for. The rows
    are then those of all these tokens, and so is the memory; kernels skip those of other devices.

    How many rows are multiplied is known when the program runs. Estimates from the program take
    each expert to have as many as the others.

    - `group`: for how many experts of a device kernels are gathered, and multiplied, at a time; it
      divides their number. None takes all of them.
    - `tiles`: the numbers of `products_for`.

    A scan runs over the groups. A small group saves memory, because the kernels of one group are
    gathered at a time, and the gradients of one are whole at a time. It takes time: gathers wait
    for the group before, and JAX's kernels work out anew which rows are whose. For Mixtral 8x7B on
    64 TPU v5p (libtpu 0.0.42.1) groups of 8, 4, 2 and 1 take 13.5, 11.8, 11.3 and 11.3 GB of temp,
    and by estimate 2.71, 3.15, 3.19 and 3.41 s.
    """

    group: int | None = None
    tiles: tuple[int, ...] | None = None

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        choice: tuple[Float[Array, "batch seq chosen"], Int[Array, "batch seq chosen"]],
        kernels: ExpertKernels,
        *,
        layout: Layout,
        remat: Remat,
        hidden: Callable[[Array], Array] = as_it_is,
    ) -> Mixed:
        """Sends all tokens through their experts; arguments are as for `DenseExperts`.

        Raises InputError for a layout in which devices that share the experts, or the width of a
        kernel, have the same tokens, and for a group that does not divide a device's experts.
        """
        del remat  # what a layer keeps of the hidden units is decided by their names
        weights, experts = choice
        tokens = x.shape[0] * x.shape[1] // layout.size("batch_beside_experts")
        rows, (every, *_) = tokens * experts.shape[-1], kernels.gate.shape
        own = every // layout.size("expert")
        group = self.group or own
        rule = f"model.expert_group={group} does not divide the {own} experts of a device"
        is_divisor(group, own, rule=rule)
        products = products_for(rows, self.tiles, share=every // group)
        grouped = OnDevice.of("grouped", every, layout, products=products, group=group)
        order = grouped.sort(experts)
        # Cast here, kernels have gradients in the dtype of the model, which become those of the
        # parameters where they are added up.
        gate, up, down = (cast_at_use(kernel, x.dtype) for kernel in kernels)
        opened, raised = map(named, _open(grouped, x, order, gate, up), HIDDEN)
        return Mixed(_close(grouped, hidden(jax.nn.silu(opened) * raised), weights, order, down))


class Groups(NamedTuple):
    """Some experts of a device, and what has been computed for those before them.

    - `products`: how groups of rows are multiplied.
    - `sizes`: how many rows each expert of the device has.
    - `some`: which experts these are; None for all of the device.
    - `results`: rows of all experts, to which these add theirs; None for all of the device.
    """

    products: GroupedProducts
    sizes: Array
    some: Some | None = None
    results: list[Array] | None = None

    def product(
        self, place: int, rows: Array, kernels: Array, *, transposed: bool = False
    ) -> Array:
        """The rows times their kernels, see `GroupedProducts.product`.

        - `place`: which of the results these rows belong to.
        """
        into = None
        if self.some is not None and self.results is not None:
            into = jnp.int32(self.some.first), self.results[place]
        return self.products.product(rows, kernels, self.sizes, into, transposed=transposed)

    def outer(self, left: Array, right: Array) -> Array:
        """The gradients of the kernels, see `GroupedProducts.outer`."""
        return self.products.outer(left, right, self.sizes, self.some)


# For the kernels of a group: the results of its rows, and gradients of its kernels or ().
OfSome = Callable[..., tuple[list[Array], tuple[Array, ...]]]


@dataclass(frozen=True, kw_only=True)
class OnDevice(ExpertAxes):
    """What a device computes for its own tokens, and what it exchanges with others.

    Arrays of rows are `[devices, rows, …]`: each device has its own rows.

    - `products`: how groups of rows are multiplied.
    - `group`: for how many of a device's experts kernels are gathered at a time.
    """

    products: GroupedProducts
    group: int

    @property
    def rows(self) -> P:
        """The sharding of hidden units, `[devices, rows, mlp]`."""
        return P(self.batch or None, None, self.mlp or None)

    @property
    def orders(self) -> tuple[P, P, P]:
        """The sharding of the arrays of an `Order`, which have an axis of devices."""
        batch = self.batch or None
        return P(batch, None), P(batch, None, None), P(batch, None)

    def sort(self, experts: Int[Array, "batch seq chosen"]) -> Order:
        """The order of the choices on each device; its arrays have an axis of devices."""

        def local(experts: Array) -> tuple[Array, ...]:
            mine = jax.lax.axis_index(self.owners) if self.owners else 0
            order = sort_by_expert(
                _flat(self.from_owners(experts)),
                first=mine * self.own,
                own=self.own,
                tile=self.products.multiple,
            )
            return tuple(leaf[None] for leaf in order)

        return Order(*per_device(local, [self.tokens], self.orders)(experts))

    def in_turn(
        self, some: "OfSome", order: Order, kernels: tuple[Array, ...]
    ) -> tuple[list[Array], tuple[Array, ...]]:
        """The results of one group of experts after the other, and the gradients of their kernels.

        - `some`: what is done for a group, see `OfSome`.
        - `order`: of the rows of this device.
        - `kernels`: of this device's experts, `[experts, …]` each.

        Returns for all experts what `some` returns for a group.
        """
        steps = self.own // self.group
        if steps == 1:  # there is nothing to add to
            return some(Groups(self.products, order.sizes), *kernels)

        def step(results: list[Array], now: tuple[Array, tuple[Array, ...]]) -> tuple[Any, Any]:
            number, own = now
            groups = Some(number * self.group, self.group)
            return some(Groups(self.products, order.sizes, groups, results), *own)

        split = tuple(kernel.reshape(steps, -1, *kernel.shape[1:]) for kernel in kernels)
        first = [kernel[0] for kernel in split]
        made, _ = jax.eval_shape(partial(some, Groups(self.products, order.sizes)), *first)
        start = [jnp.zeros(one.shape, one.dtype) for one in made]
        now = (jnp.arange(steps, dtype=jnp.int32), split)
        results, gradients = jax.lax.scan(step, start, now)
        return results, tuple(one.reshape(-1, *one.shape[2:]) for one in gradients)

    def from_owners(self, x: Array) -> Array:
        """What all devices that share the experts have, `[batch, …]`: an all-gather."""
        return jax.lax.all_gather(x, self.owners, axis=0, tiled=True) if self.owners else x

    def to_owners(self, y: Array, like: Array) -> Array:
        """Adds up parts of a result and leaves each device its own tokens: a reduce-scatter.

        - `y`: float32 `[tokens, …]`, this device's part.
        - `like`: gives batch and sequence of the tokens of this device, and the dtype of the sum.
        """
        y = self.over_parts(y).reshape(-1, like.shape[1], y.shape[-1])
        if self.owners:
            y = jax.lax.psum_scatter(y, self.owners, scatter_dimension=0, tiled=True)
        return y.astype(like.dtype)


def _flat(x: Array) -> Array:
    """`[batch, seq, …]` to `[tokens, …]`."""
    return x.reshape(-1, *x.shape[2:])


def _mine(order: tuple[Array, ...]) -> Order:
    """The order of one device."""
    return Order(*(leaf[0] for leaf in order))


def _no_gradients(order: Order) -> Any:
    return Order(*(np.zeros(leaf.shape, jax.dtypes.float0) for leaf in order))  # type: ignore[arg-type]


def _opened(on: OnDevice, x: Array, order: Order, gate: Array, up: Array) -> tuple[Array, Array]:
    """Each row times gate and up of its expert, `[devices, rows, mlp]` each.

    - `x`: `[batch, seq, embed]`.
    """

    def local(x: Array, *rest: Array) -> tuple[Array, ...]:
        order, kernels = _mine(rest[:3]), rest[3:]
        rows = to_rows(_flat(on.from_owners(x)), order)

        def some(groups: Groups, *kernels: Array) -> tuple[Any, tuple[()]]:
            whole = (on.gathered(kernel, 1) for kernel in kernels)
            return [groups.product(place, rows, one) for place, one in enumerate(whole)], ()

        return tuple(rows[None] for rows in on.in_turn(some, order, kernels)[0])

    specs = [on.tokens, *on.orders, on.into, on.into]
    opened, raised = per_device(local, specs, [on.rows, on.rows])(x, *order, gate, up)
    return opened, raised


def _open_forward(on: OnDevice, x: Array, order: Order, gate: Array, up: Array) -> Any:
    return _opened(on, x, order, gate, up), (x, order, gate, up)


def _open_backward(on: OnDevice, kept: Any, cotangents: tuple[Array, Array]) -> Any:
    x, order, gate, up = kept

    def local(x: Array, *rest: Array) -> tuple[Array, ...]:
        order, kernels, d_rows = _mine(rest[:3]), rest[3:5], [each[0] for each in rest[5:]]
        rows = to_rows(_flat(on.from_owners(x)), order)

        def some(groups: Groups, *kernels: Array) -> tuple[Any, Any]:
            parts, d_kernels = [], []
            for place, (kernel, d_row) in enumerate(zip(kernels, d_rows, strict=True)):
                whole = on.gathered(kernel, 1)
                parts.append(groups.product(place, d_row, whole, transposed=True))
                d_kernels.append(on.summed(groups.outer(rows, d_row), 1))
            return parts, tuple(d_kernels)

        (of_gate, of_up), d_kernels = on.in_turn(some, order, kernels)
        return on.to_owners(from_rows(of_gate + of_up, order), x), *d_kernels

    specs = [on.tokens, *on.orders, on.into, on.into, on.rows, on.rows]
    outs = [on.tokens, on.into, on.into]
    d_x, d_gate, d_up = per_device(local, specs, outs)(x, *order, gate, up, *cotangents)
    return d_x, _no_gradients(order), d_gate, d_up


_open = jax.custom_vjp(_opened, nondiff_argnums=(0,))
_open.defvjp(_open_forward, _open_backward)


def _closed(on: OnDevice, hidden: Array, weights: Array, order: Order, down: Array) -> Array:
    """Σ over the choices of a token of weight · hidden · down, `[batch, seq, embed]`.

    - `hidden`: `[devices, rows, mlp]`.
    - `weights`: of the choices, `[batch, seq, chosen]`.
    """

    def local(hidden: Array, weights: Array, *rest: Array) -> tuple[Array, ...]:
        order, down = _mine(rest[:3]), rest[3]
        share = of_rows(_flat(on.from_owners(weights)), order)
        weighed = hidden[0] * share[:, None]

        def some(groups: Groups, down: Array) -> tuple[Any, tuple[()]]:
            return [groups.product(0, weighed, on.gathered(down, 2))], ()

        (rows,), _ = on.in_turn(some, order, (down,))
        return (on.to_owners(from_rows(rows, order), weights),)

    specs = [on.rows, on.tokens, *on.orders, on.down]
    (mixed,) = per_device(local, specs, [on.tokens])(hidden, weights, *order, down)
    return mixed


def _close_forward(on: OnDevice, hidden: Array, weights: Array, order: Order, down: Array) -> Any:
    return _closed(on, hidden, weights, order, down), (hidden, weights, order, down)


def _close_backward(on: OnDevice, kept: Any, cotangent: Array) -> Any:
    hidden, weights, order, down = kept

    def local(hidden: Array, weights: Array, *rest: Array) -> tuple[Array, ...]:
        order, down, cotangent = _mine(rest[:3]), rest[3], rest[4]
        hidden, share = hidden[0], of_rows(_flat(on.from_owners(weights)), order)
        d_rows = to_rows(_flat(on.from_owners(cotangent)), order)
        weighed = hidden * share[:, None]

        def some(groups: Groups, down: Array) -> tuple[Any, Any]:
            part = groups.product(0, d_rows, on.gathered(down, 2), transposed=True)
            return [part], (on.summed(groups.outer(weighed, d_rows), 2),)

        (d_weighed,), (d_down,) = on.in_turn(some, order, (down,))
        d_share = jnp.sum((d_weighed * hidden).astype(jnp.float32), axis=1)
        d_weights = on.to_owners(of_choices(d_share, order), weights)
        d_hidden = d_weighed * share[:, None]
        return d_hidden[None], d_weights, d_down

    specs = [on.rows, on.tokens, *on.orders, on.down, on.tokens]
    outs = [on.rows, on.tokens, on.down]
    d_hidden, d_weights, d_down = per_device(local, specs, outs)(
        hidden, weights, *order, down, cotangent
    )
    return d_hidden, d_weights, _no_gradients(order), d_down


_close = jax.custom_vjp(_closed, nondiff_argnums=(0,))
_close.defvjp(_close_forward, _close_backward)
