"""Where arrays live: logical axis names, the mesh axes they are spread over, and one way to say it
in explicit and in auto mode.

Everything here reads the ambient mesh (`jax.set_mesh`) and does nothing without one, so a layer is
written once and runs on one device, on a mesh with explicit axes and on one with auto axes.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from nnx_pipeline.errors import InputError, nearest

PORTABLE = "threefry2x32"  # JAX's generator whose numbers depend on the key alone
MeshAxes = tuple[str, ...]
Constrain = Callable[[Array, P], Array]
Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True)
class Layout:
    """Which mesh axes each logical axis is spread over, most significant first.

    The first block names axes of weights, the second axes of activations. `stage` and `batch` are
    never axes of the same weight; outside the pipeline the batch is spread over `stage` too, as
    `(microbatch, batch)` while it is cut into microbatches and as `whole_batch` while it is not.

    copy: mesh axes along which the layers run in copies, each with weights of its own (see
    `pipeline.lend`); arrays of a microbatch then begin with `(copy, batch)`.
    """

    stage: MeshAxes = ("stage",)
    vocab: MeshAxes = ("stage", "tensor")
    embed: MeshAxes = ("fsdp", "expert")
    embed_of_expert: MeshAxes = ("fsdp",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    head_dim: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    expert: MeshAxes = ("expert",)
    norm: MeshAxes = ()

    batch: MeshAxes = ("data", "fsdp", "expert")
    batch_beside_experts: MeshAxes = ("data", "fsdp")
    microbatch: MeshAxes = ("stage",)
    whole_batch: MeshAxes = ("stage", "data", "fsdp", "expert")
    vocab_of_logits: MeshAxes = ("tensor",)
    copy: MeshAxes = ()

    def in_copies(self, copy: MeshAxes) -> "Layout":
        """The layout of activations that have an axis of copies over these mesh axes."""

        def rest(axes: MeshAxes) -> MeshAxes:
            return tuple(axis for axis in axes if axis not in copy)

        return dataclasses.replace(
            self,
            copy=copy,
            batch=rest(self.batch),
            batch_beside_experts=rest(self.batch_beside_experts),
        )

    def gathered(self, over: MeshAxes) -> "Layout":
        """The layout of layers whose weights have been gathered: no axis is spread over these."""
        weights = {name: getattr(self, name) for name in ("embed", "embed_of_expert")}
        whole = {name: () for name, axes in weights.items() if set(axes) & set(over)}
        return dataclasses.replace(self, **whole)

    def owned(self, over: MeshAxes) -> "Layout":
        """The layout of weights that are spread over these mesh axes besides.

        That is where the optimizer's state is with `train.shard_optimizer_over_data`. The new axes
        come last, so that a device's part is a slice of what it stores.
        """
        weights = ("embed", "embed_of_expert", "norm")
        return dataclasses.replace(
            self, **{name: (*getattr(self, name), *over) for name in weights}
        )

    def axes(self, name: str) -> MeshAxes:
        """The mesh axes of one logical axis that have more than one device on the ambient mesh."""
        if name not in _LOGICAL_AXES:
            raise InputError(f"logical axis {name!r} is not known; {nearest(name, _LOGICAL_AXES)}")
        sizes = mesh_sizes()
        return tuple(axis for axis in getattr(self, name) if sizes.get(axis, 1) > 1)

    def size(self, name: str) -> int:
        """How many parts a logical axis has on the ambient mesh."""
        return math.prod(mesh_sizes()[axis] for axis in self.axes(name))

    def spec(self, *names: str | None) -> P:
        """The partition spec of an array with these logical axes; None is an axis kept whole.

        Mesh axes of size 1 are left out, so on one device every spec is trivial.
        """
        entries: list[str | MeshAxes | None] = []
        for name in names:
            axes = self.axes(name) if name else ()
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return P(*entries)

    def variable(self, value: Array, logical_axes: tuple[str | None, ...]) -> nnx.Param:
        """A parameter that remembers its logical axes."""
        return nnx.Param(value, logical_axes=logical_axes)


_LOGICAL_AXES = tuple(axis.name for axis in fields(Layout))


def mesh_sizes() -> dict[str, int]:
    """Axis sizes of the ambient mesh; empty without one."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def is_explicit() -> bool:
    """Whether shardings are part of the types on the ambient mesh.

    Raises InputError for a mesh with axes of both kinds.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = set(mesh.axis_types)
    if {AxisType.Explicit, AxisType.Auto} <= kinds:
        pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
        said = ", ".join(f"{name}={kind.name}" for name, kind in pairs)
        raise InputError(
            f"the axes of a mesh must all be explicit or all be auto, and they are {said}; "
            "make it with make_mesh, or give jax.make_mesh one of the two for all axes"
        )
    return AxisType.Explicit in kinds


def is_trivial(spec: P) -> bool:
    """Whether a spec spreads nothing."""
    return all(entry is None or entry == () for entry in spec)


def spec_axes(spec: P) -> set[str]:
    """The mesh axes that a spec uses."""
    axes: set[str] = set()
    for entry in spec:
        axes.update((entry,) if isinstance(entry, str) else entry or ())
    return axes


def out_sharding(spec: P) -> P | None:
    """The value for an `out_sharding=` argument: the spec in explicit mode, else nothing."""
    return spec if is_explicit() else None


_LEFT_TO_COMPILER = contextvars.ContextVar("left_to_compiler", default=False)


@contextlib.contextmanager
def left_to_compiler() -> Iterator[None]:
    """Within it `place` says nothing in auto mode, as an arm of an experiment has it: the compiler
    finds the way of weights and tokens from arguments, results and what `hold` says."""
    token = _LEFT_TO_COMPILER.set(True)
    try:
        yield
    finally:
        _LEFT_TO_COMPILER.reset(token)


def place(x: Array, spec: P) -> Array:
    """Moves `x` to `spec`: a reshard in explicit mode, a constraint in auto mode."""
    return x if _LEFT_TO_COMPILER.get() and not is_explicit() else hold(x, spec)


def hold(x: Array, spec: P) -> Array:
    """As `place`, for what the compiler is told in any case: where a layer's output is, and that
    what belongs to a stage is on that stage."""
    if is_explicit():
        return jax.sharding.reshard(x, spec)
    if mesh_sizes():
        return jax.lax.with_sharding_constraint(x, spec)
    return x


def constrain(x: Array, spec: P) -> Array:
    """Holds an activation to `spec`; a spec that spreads nothing is skipped.

    A constraint without content still leaves a custom call in the program, which XLA may carry
    through a scan (seeds S2.4a).
    """
    return x if is_trivial(spec) else hold(x, spec)


def spec_of(x: Array, *, stage_axis: int) -> P:
    """The spec of `x` for a `shard_map` over `stage`, which lies on the axis `stage_axis`.

    In explicit mode it is the whole spec in the type: a `shard_map` that is told of `stage` alone
    keeps the other axes gathered inside (JAX 0.10 and 0.12). In auto mode XLA knows the others.
    """
    if is_explicit():
        return jax.typeof(x).sharding.spec
    return P(*[None] * stage_axis, "stage")


def manual_axes() -> set[str]:
    """The mesh axes that a `shard_map` over stages takes over: all in explicit mode."""
    return set(mesh_sizes()) if is_explicit() else {"stage"}


def gather_weight(kernel: Array, stored: P, used: P) -> Array:
    """A stored weight as a matrix product wants it: gathered over the axes that `used` leaves out.

    The gradient goes back the other way, a reduce-scatter to `stored`. In auto mode the second
    constraint says so; without it XLA returns the gradient gathered.
    """
    if stored == used or not mesh_sizes():
        return kernel
    return place(kernel if is_explicit() else place(kernel, stored), used)


def portable_key(key: Array) -> Array:
    """The key, or one made from it whose numbers depend on nothing but the key.

    Those of JAX's other generators (`rbg`) depend on how an array is spread and on `vmap`.
    """
    if jax.random.key_impl(key) == PORTABLE:
        return key
    return jax.random.key(jax.random.bits(key, dtype="uint32"), impl=PORTABLE)


def parameter(
    rngs: nnx.Rngs,
    initializer: nnx.initializers.Initializer,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    logical_axes: tuple[str | None, ...],
    layout: Layout,
) -> nnx.Param:
    """A parameter that is born in its sharding and remembers its logical axes."""
    value = initial_value(rngs.params(), initializer, shape, dtype, layout.spec(*logical_axes))
    return layout.variable(value, logical_axes)


def initial_value(
    key: Array,
    initializer: nnx.initializers.Initializer,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    spec: P,
) -> Array:
    """What a parameter starts with, made in its place, the same wherever that is."""
    value = initializer(portable_key(key), shape, dtype, out_sharding=out_sharding(spec))
    return place(value, spec) if mesh_sizes() and not is_explicit() else value


def variable_shardings(tree: nnx.Module, layout: Layout, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The tree with a NamedSharding for every parameter, from its logical axes.

    To be called under the mesh. The result serves as `out_shardings` of a jitted initialisation and
    as placement for gradients, in both modes.
    """

    def sharding(variable: nnx.Variable) -> nnx.Variable:
        spec = layout.spec(*variable.get_metadata("logical_axes"))
        return variable.replace(NamedSharding(mesh, spec))

    return jax.tree.map(sharding, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def place_by(tree: Module, layout: Layout) -> Module:
    """The tree with every variable moved to where its logical axes are in `layout`."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        spec = layout.spec(*variable.get_metadata("logical_axes"))
        return variable.replace(place(variable.get_value(), spec))

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def with_layout(module: Module, layout: Layout) -> Module:
    """A copy whose modules all go by `layout`; the variables keep their values and metadata."""
    copy = jax.tree.map(lambda leaf: leaf, module)
    for _, inner in nnx.iter_modules(copy):
        if hasattr(inner, "layout"):
            inner.layout = layout
    return copy
