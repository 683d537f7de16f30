"""Logical axes of arrays, the mesh axes they are sharded over, and how arrays are placed.

All of it reads the ambient mesh (`jax.set_mesh`) and does nothing without one.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeGuard, TypeVar

import jax
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from nnx_pipeline.lab.errors import InputError, nearest
from nnx_pipeline.lab.mesh import AXES, is_trivial

P = PartitionSpec
PORTABLE = "threefry2x32"  # the JAX random generator whose numbers depend on the key alone
MeshAxes = tuple[str, ...]
AxisName = str | tuple[str, ...] | None  # of one axis of an array: see `Layout.spec`
_Module = TypeVar("_Module", bound=nnx.Module)
Made = TypeVar("Made")
Variable = nnx.Variable[Array]


@dataclass(frozen=True)
class Layout:
    """Which mesh axes each logical axis is sharded over, the most significant mesh axis first.

    No two axes of one array may be sharded over the same mesh axis. Axes of weights:

    - `stage`: the stages: the second axis of stacked weights, `[repeats, stages, layers per stage,
      …]`.
    - `vocab`: the token ids: rows of the embedding table, and columns of the head.
    - `embed`: the residual stream's width in weights of the layers but those of experts and norms.
    - `embed_of_vocab`: the residual stream's width in the embedding table and in the head.
    - `embed_of_expert`: the same in a kernel of the experts, which has the axis `expert` too.
    - `latent`: the latent vectors of multi-head latent attention, in the kernels that read them.
    - `heads`: the query heads, in the query and output kernels and in the results of these.
    - `kv_heads`: the key-value heads, in the key and value kernels and in their results.
    - `head_dim`: the width of one head, in the four kernels of attention.
    - `mlp`: the hidden units, in the kernels of the MLP or of the experts and in their activations.
    - `expert`: the experts, in their kernels and in activations inside the expert layers.
    - `norm`: the residual stream's width in the scale of an RMSNorm.

    Axes of activations:

    - `batch`: the sequences that the layers of a stage work on, in all activations of the layers.
    - `batch_beside_experts`: the sequences in an array that has the axis `expert` too.
    - `microbatch`: the microbatches of a batch outside the pipeline, which has the axes
      `(microbatch, batch)`; with it the batch is sharded over `stage` too.
    - `whole_batch`: the sequences of a batch outside the pipeline that is not cut into
      microbatches.
    - `vocab_of_logits`: the token ids in logits and, while logits are computed, in the head.
    - `copy`: copies of the layers, each with its own copy of the weights (`pipeline.gather`). Where
      there are any, the activations of a microbatch begin with `(copy, batch)`.
    """

    stage: MeshAxes = ("stage",)
    vocab: MeshAxes = ("stage", "tensor")
    embed: MeshAxes = ("fsdp", "expert")
    embed_of_vocab: MeshAxes = ("fsdp", "expert")
    embed_of_expert: MeshAxes = ("fsdp",)
    latent: MeshAxes = ("fsdp", "expert")
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
        """The layout of activations with a leading axis of copies over the mesh axes `copy`.

        These mesh axes no longer shard the batch within a copy.
        """
        batch = tuple(axis for axis in self.batch if axis not in copy)
        with_experts = tuple(axis for axis in self.batch_beside_experts if axis not in copy)
        return dataclasses.replace(self, copy=copy, batch=batch, batch_beside_experts=with_experts)

    def gathered(self, over: MeshAxes) -> "Layout":
        """The layout of layers whose weights are gathered over the mesh axes `over`."""
        weights = {name: getattr(self, name) for name in ("embed", "embed_of_expert", "latent")}
        whole = {name: () for name, axes in weights.items() if set(axes) & set(over)}
        return dataclasses.replace(self, **whole)

    def zero1(self, over: MeshAxes) -> "Layout":
        """The layout of weights that are also sharded over these mesh axes (ZeRO-1)."""
        # The new axes come last, so that a device's shard is a slice of what it stores already.
        weights = ("embed", "embed_of_vocab", "embed_of_expert", "latent", "norm")
        return dataclasses.replace(
            self, **{name: (*getattr(self, name), *over) for name in weights}
        )

    def for_vocabulary(self, size: int, width: int, zero1: MeshAxes = ()) -> "Layout":
        """The layout in which table and head of any vocabulary fit the ambient mesh.

        `size` is the number of token ids, `width` the residual stream's, and `zero1` are the mesh
        axes that `Layout.zero1` is to add. Where the ids do not split over the mesh axes of
        `vocab`, the width splits over them instead. Where it does not either, one of the two is
        sharded over as many devices as it splits over, and both are whole along the other axes.
        """
        sizes = mesh_sizes()

        def devices(axes: MeshAxes) -> int:
            return math.prod(sizes.get(axis, 1) for axis in axes)

        def fitting(length: int, used: MeshAxes = ()) -> MeshAxes:
            counts = range(len(self.vocab), -1, -1)
            some = (some for n in counts for some in itertools.combinations(self.vocab, n))
            fit = (axes for axes in some if length % devices((*used, *axes)) == 0)
            return max(fit, key=devices, default=())

        rows = fitting(size)
        columns = fitting(width, (*self.embed_of_vocab, *zero1))
        if devices(rows) == devices(self.vocab) or devices(rows) > devices(columns):
            return dataclasses.replace(self, vocab=rows)
        wide = tuple(dict.fromkeys((*self.embed_of_vocab, *columns)))
        return dataclasses.replace(self, vocab=(), embed_of_vocab=wide)

    def axes(self, name: str) -> MeshAxes:
        """The mesh axes of a logical axis that have more than one device on the ambient mesh.

        A mesh axis stands for itself. Raises InputError for another name.
        """
        sizes = mesh_sizes()
        if name not in _LOGICAL_AXES and name not in sizes and name not in AXES:
            known = dict.fromkeys((*_LOGICAL_AXES, *(sizes or AXES)))
            raise InputError(
                f"axis {name!r} is neither a logical axis nor an axis of the mesh; "
                f"{nearest(name, known)}"
            )
        mesh_axes = getattr(self, name) if name in _LOGICAL_AXES else (name,)
        return tuple(axis for axis in mesh_axes if sizes.get(axis, 1) > 1)

    def size(self, name: str) -> int:
        return math.prod(mesh_sizes()[axis] for axis in self.axes(name))

    def spec(self, *names: AxisName) -> P:
        """The partition spec of an array with these logical axes.

        - `names`: one per array axis, of a logical or a mesh axis, or a tuple of several; None for
          an axis that is not sharded.

        Mesh axes of size 1 are left out, so on one device every spec is trivial.
        """
        entries: list[str | MeshAxes | None] = []
        for name in names:
            several = name if isinstance(name, tuple) else (name,) if name else ()
            axes = tuple(axis for each in several for axis in self.axes(each))
            entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
        return P(*entries)

    def variable(self, value: Array, logical_axes: tuple[AxisName, ...]) -> nnx.Param[Array]:
        """A parameter whose metadata holds its logical axes; `value` is in its sharding already."""
        return nnx.Param(value, logical_axes=logical_axes)


_LOGICAL_AXES = tuple(axis.name for axis in fields(Layout))


def mesh_sizes() -> dict[str, int]:
    """The axis sizes of the ambient mesh; empty if there is no mesh.

    Inside a `shard_map` over some of the axes these are left out: no array is sharded over them
    there. Inside one over the whole mesh all are there, for collectives.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = list(zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True))
    free = {name: size for name, size, kind in axes if kind != AxisType.Manual}
    return free or dict(mesh.shape)


def is_explicit() -> bool:
    """Whether the axes of the ambient mesh are explicit, so that array types hold shardings.

    Raises InputError for a mesh with both explicit and auto axes.
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


def out_sharding(spec: P) -> P | None:
    return spec if is_explicit() else None


_LEFT_TO_COMPILER = contextvars.ContextVar("left_to_compiler", default=False)


@contextlib.contextmanager
def left_to_compiler() -> Iterator[None]:
    """A context, for one arm of an experiment, in which `place` does nothing in auto mode.

    The compiler then derives how weights and tokens move from what `hold` says.
    """
    token = _LEFT_TO_COMPILER.set(True)
    try:
        yield
    finally:
        _LEFT_TO_COMPILER.reset(token)


def place(x: Array, spec: P) -> Array:
    """Moves an array: a reshard in explicit mode, a sharding constraint in auto mode.

    It does nothing without a mesh, and nothing in auto mode within `left_to_compiler`.
    """
    return x if _LEFT_TO_COMPILER.get() and not is_explicit() else hold(x, spec)


def hold(x: Array, spec: P) -> Array:
    """As `place`, even within `left_to_compiler`: for the places of layer outputs and of stages."""
    if is_explicit():
        x = jax.sharding.reshard(x, spec)
    elif mesh_sizes():
        x = _constrained(x, spec)
    return x


# Outside of a program a constraint refuses an array that was made before the mesh was set; as an
# argument of a program it is moved. Within a program `inline` leaves the constraint alone.
_constrained = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)


def constrain(x: Array, spec: P) -> Array:
    """Moves an activation to `spec`, unless the spec shards no axis.

    A constraint that shards nothing still leaves a custom call, which may be carried by a scan.
    """
    return x if is_trivial(spec) else hold(x, spec)


def spec_of(x: Array, *, stage_axis: int) -> P:
    """The partition spec of `x` for a `shard_map` over the mesh axis `stage`.

    In explicit mode it is that of the array's type: a `shard_map` that names `stage` alone gathers
    the other axes inside (JAX 0.10 and 0.12). In auto mode XLA keeps the sharding of the others.
    """
    if is_explicit():
        spec: P = jax.typeof(x).sharding.spec
        return spec
    return P(*[None] * stage_axis, "stage")


def manual_axes() -> set[str]:
    """The mesh axes that are manual in a `shard_map` over stages: all of them in explicit mode."""
    return set(mesh_sizes()) if is_explicit() else {"stage"}


def gather_weight(kernel: Array, stored: P, used: P) -> Array:
    """Moves a weight from where it is stored to where a matrix product reads it.

    The gradient goes the opposite way, by a reduce-scatter to `stored`.
    """
    if stored == used or not mesh_sizes():
        return kernel
    # In auto mode the constraint to `stored` applies to the gradient too; without it XLA returns
    # the gradient gathered.
    return place(kernel if is_explicit() else place(kernel, stored), used)


def reordered(x: Array, axis: int, old: MeshAxes, new: MeshAxes) -> Array:
    """The array with the shards along one axis, that collectives put together, in another order.

    `old` are the mesh axes in whose order they are, and `new` the same ones in the new order,
    the most significant one first. `x` is whole along `axis` on a device.
    """
    if old == new:
        return x
    sizes, before = mesh_sizes(), x.shape[:axis]
    split = x.reshape(*before, *(sizes[name] for name in old), -1, *x.shape[axis + 1 :])
    order = [axis + old.index(name) for name in new]
    rest = range(axis + len(old), split.ndim)
    return split.transpose(*range(axis), *order, *rest).reshape(x.shape)


def portable_key(key: Array) -> Array:
    """A key whose random numbers depend on the key alone: this one, or one made from it.

    The numbers of JAX's other generators (`rbg`) depend on shardings and on `vmap`.
    """
    if jax.random.key_impl(key) == PORTABLE:
        return key
    return jax.random.key(jax.random.bits(key, dtype="uint32"), impl=PORTABLE)


def parameter(
    rngs: nnx.Rngs,
    layout: Layout,
    dtype: jax.typing.DTypeLike,
    initializer: Initializer,
    shape: tuple[int, ...],
    logical_axes: tuple[str | None, ...],
) -> nnx.Param[Array]:
    """Creates a parameter in its sharding; its metadata holds its logical axes."""
    value = initial_value(rngs.params(), initializer, shape, dtype, layout.spec(*logical_axes))
    return layout.variable(value, logical_axes)


def initial_value(
    key: Array,
    initializer: Initializer,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    spec: P,
) -> Array:
    """Creates the initial value of a parameter in its sharding, which does not change the value."""
    value = initializer(portable_key(key), shape, dtype, out_sharding=out_sharding(spec))
    return place(value, spec) if mesh_sizes() and not is_explicit() else value


def variable_shardings(tree: Made, layout: Layout, mesh: jax.sharding.Mesh) -> Made:
    """A NamedSharding for every leaf, by the logical axes of its variable; else unsharded.

    `mesh` must be the ambient mesh.
    """

    def sharding(leaf: Array | nnx.Variable[object]) -> NamedSharding | nnx.Variable[object]:
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, P())
        spec = layout.spec(*leaf.get_metadata("logical_axes"))
        return leaf.replace(NamedSharding(mesh, spec))

    shardings: Made = jax.tree.map(sharding, tree, is_leaf=is_variable)
    return shardings


def abstract(make: Callable[[], Made], layout: Layout = Layout()) -> Made:
    """What a function makes, with a sharded `jax.ShapeDtypeStruct` in the place of each array.

    - `make`: takes no arguments, and returns modules, optimizers, arrays, or a pytree of them; it
      is traced, and nothing is computed.
    - `layout`: as of the modules.

    Call it under `jax.set_mesh`. `nnx.eval_shape` alone leaves the variables of this package
    unsharded on a mesh with auto axes.
    """
    made: Made = nnx.eval_shape(make)
    mesh = jax.sharding.get_abstract_mesh()
    for _, variable in nnx.iter_graph(made) if mesh_sizes() else ():
        if not isinstance(variable, nnx.Variable):
            continue
        axes = variable.get_metadata().get("logical_axes")
        value = variable.get_value()
        # A factored moment has the metadata of its parameter, and fewer axes.
        if axes is not None and len(axes) == value.ndim:
            sharding = NamedSharding(mesh, layout.spec(*axes))
            variable.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    return made


def place_by(tree: _Module, layout: Layout) -> _Module:
    """The module with every variable moved to the placement of its logical axes in a layout."""

    def moved(variable: Variable) -> Variable:
        spec = layout.spec(*variable.get_metadata("logical_axes"))
        return variable.replace(place(variable.get_value(), spec))

    placed: _Module = jax.tree.map(moved, tree, is_leaf=is_variable)
    return placed


def is_variable(leaf: object) -> TypeGuard[Variable]:
    return isinstance(leaf, nnx.Variable)


def with_layout(module: _Module, layout: Layout) -> _Module:
    """A copy of a module in which it and every module inside it that has a `layout` has this one.

    The variables keep their values and metadata.
    """
    # Mapping the identity over the leaves makes new module objects, which may then be changed.
    copy: _Module = jax.tree.map(lambda leaf: leaf, module)
    for _, inner in nnx.iter_modules(copy):
        if hasattr(inner, "layout"):
            inner.layout = layout
    return copy
