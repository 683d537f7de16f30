"""How a Linen module holds a weight: under MaxText's names, born in its place."""

from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from nnx_pipeline import InputError, Layout
from nnx_pipeline.errors import nearest
from nnx_pipeline.sharding import MeshAxes, initial_value, is_explicit, is_trivial, place

Names = tuple[str | None, ...]

# The logical axes in MaxText's metadata, and what `Layout` calls each; None is kept whole.
AXES: dict[str, str | None] = {
    "vocab": "vocab",
    "embed_vocab": "embed",
    "embed": "embed",
    "embed_moe": "embed_of_expert",
    "q_heads": "heads",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "kv": "head_dim",
    "kv_head_dim": "head_dim",
    "mlp": "mlp",
    "mlp_moe": "mlp",
    "exp": "expert",
    "norm": "norm",
    "layers": "stage",
    "circular_repeats": None,
}


def logical_axis_rules(
    mesh: Mesh, layout: Layout = Layout()
) -> tuple[tuple[str, MeshAxes | None], ...]:
    """MaxText's logical axes and the mesh axes that each is spread over, as Flax wants its rules.

    For `nn.logical_to_mesh_sharding` and `nn.logical_to_mesh`. Mesh axes of size 1 are left out, as
    in `Layout.spec`, so that arrays placed by these rules have the types that the modules expect.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        spread = {name: layout.axes(axis) if axis else () for name, axis in AXES.items()}
    return tuple((name, axes or None) for name, axes in spread.items())


def axes_of(names: Names) -> tuple[str | None, ...]:
    """The names in `Layout` of MaxText's logical axes; InputError for one that is neither."""
    for name in names:
        if name is not None and name not in AXES:
            raise InputError(f"logical axis {name!r} is not known; {nearest(name, AXES)}")
    return tuple(AXES[name] if name is not None else None for name in names)


def parameter(
    module: nn.Module,
    name: str,
    initializer: nn.initializers.Initializer,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    names: Names,
    layout: Layout,
) -> Array:
    """The parameter of that name in a module; `init` makes it in its place, in a box of its names.

    What is given to `apply` may be boxed or not, and is used where it lies (`in_place`): rules that
    are set by `nn.logical_axis_rules` add no constraint.
    """
    spec = layout.spec(*axes_of(names))

    def make(key: Array) -> nn.LogicallyPartitioned:
        return nn.LogicallyPartitioned(initial_value(key, initializer, shape, dtype, spec), names)

    return in_place(unboxed(module.param(name, make, unbox=False)), spec)


def in_place(weight: Array, spec: P) -> Array:
    """The weight, which each device cuts its part of if all of them were given the whole.

    So are arrays of numpy on a mesh with explicit axes. Any other is used where it lies.
    """
    if is_trivial(spec) or not is_explicit() or not is_trivial(jax.typeof(weight).sharding.spec):
        return weight
    return place(weight, spec)


def unboxed(value: Any) -> Array:
    """The array of a leaf of `params`, boxed or not, without a constraint."""
    return value.unbox(apply_constraint=False) if is_boxed(value) else value


def is_boxed(leaf: Any) -> bool:
    """Whether a leaf of `params` names its axes."""
    return isinstance(leaf, nn.LogicallyPartitioned)


class Kernel(nn.Module):
    """A weight under a name of its own: `<name of the module>/kernel`."""

    initializer: nn.initializers.Initializer
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    names: Names
    layout: Layout = Layout()

    def setup(self) -> None:
        self.kernel = parameter(
            self, "kernel", self.initializer, self.shape, self.dtype, self.names, self.layout
        )

    def __call__(self) -> Array:
        return self.kernel
