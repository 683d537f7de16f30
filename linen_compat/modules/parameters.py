"""Weights of Linen modules: under MaxText's names, and made in their final sharding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from linen_compat.formats._arguments import check_config
from nnx_pipeline import InputError, Layout, ModelConfig
from nnx_pipeline.lab.errors import nearest
from nnx_pipeline.lab.mesh import is_trivial
from nnx_pipeline.sharding.layout import MeshAxes, initial_value, is_explicit, place

Names = tuple[str | None, ...]

# The logical axes in MaxText's metadata, and what `Layout` calls each; None is not sharded.
AXES: dict[str, str | None] = {
    **{name: name for name in ("vocab", "embed", "heads", "kv_heads", "mlp", "norm")},
    "embed_vocab": "embed_of_vocab",
    "embed_moe": "embed_of_expert",
    "q_heads": "heads",
    "kv": "head_dim",
    "kv_head_dim": "head_dim",
    "mlp_moe": "mlp",
    "exp": "expert",
    "q_lora": "latent",
    "kv_lora": "latent",
    "layers": "stage",
    **dict.fromkeys(("q_lora_up_proj", "kv_lora_up_proj", "moe_layers", "dense_layers")),
    "circular_repeats": None,
}


def logical_axis_rules(
    mesh: Mesh, layout: Layout = Layout()
) -> tuple[tuple[str, MeshAxes | None], ...]:
    """The mesh axes of each of MaxText's logical axes, as rules for Flax.

    They are for `nn.logical_to_mesh_sharding` and `nn.logical_to_mesh`. Mesh axes of size 1 are
    left out, so that arrays placed by these rules have the types that the modules expect. `layout`
    is that of the modules: for a vocabulary that does not split over the mesh
    `Layout().for_vocabulary(…)`, made under `jax.set_mesh(mesh)`.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        spread = {name: layout.axes(axis) if axis else () for name, axis in AXES.items()}
    return tuple((name, axes or None) for name, axes in spread.items())


def axes_of(names: Names) -> tuple[str | None, ...]:
    """The names in `Layout` of MaxText's logical axes; raises InputError for an unknown one."""
    for name in names:
        if name is not None and name not in AXES:
            raise InputError(f"logical axis {name!r} is not known; {nearest(name, AXES)}")
    return tuple(AXES[name] if name is not None else None for name in names)


class Weight(NamedTuple):
    """What a parameter is before it is made; `names` are MaxText's logical axes."""

    initializer: nn.initializers.Initializer
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    names: Names


def boxed_parameter(module: nn.Module, name: str, weight: Weight, layout: Layout) -> Array:
    """A parameter of a Linen module, which `init` makes in its final sharding, in a metadata box.

    An array given to `apply` may be boxed or not. It keeps its sharding (see `sharded_by`): rules
    of `nn.logical_axis_rules` add no constraint.
    """
    initializer, shape, dtype, names = weight
    spec = layout.spec(*axes_of(names))

    def make(key: Array) -> nn.LogicallyPartitioned:
        return nn.LogicallyPartitioned(initial_value(key, initializer, shape, dtype, spec), names)

    # Orbax restores NumPy arrays, which lack some methods of JAX arrays.
    return sharded_by(jnp.asarray(unboxed(module.param(name, make, unbox=False))), spec)


def sharded_by(weight: Array, spec: P) -> Array:
    """Shards a replicated weight by `spec`; any other weight keeps its sharding.

    NumPy arrays arrive replicated on meshes with explicit axes; each device cuts out its shard.
    """
    if is_trivial(spec) or not is_explicit() or not is_trivial(jax.typeof(weight).sharding.spec):
        return weight
    return place(weight, spec)


def unboxed(leaf: PyTree) -> PyTree:
    """The array of a variable, in a metadata box or not, in the sharding that it has."""
    if isinstance(leaf, meta.Partitioned):
        return leaf.unbox(apply_constraint=False)
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


def is_boxed(leaf: object) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


class Configured(nn.Module):
    """A module with a config, whose kind is checked when the module is made."""

    config: object

    def __post_init__(self) -> None:
        kind = type(self).__dataclass_fields__["config"].type
        check_config(f"the config of {type(self).__name__}", self.config, kind)
        super().__post_init__()


class OfModel(Configured):
    """A part of a model, with the mesh axes over which each logical axis is sharded."""

    config: ModelConfig
    layout: Layout = Layout()


class Kernel(nn.Module):
    """A `Weight` as a module of its own, so that its path is `<name of the module>/kernel`.

    With `biased` there is a bias beside it, `<name of the module>/bias`, of its last axes.
    """

    layout: Layout
    dtype: jax.typing.DTypeLike
    initializer: nn.initializers.Initializer
    shape: tuple[int, ...]
    names: Names
    biased: int = 0  # how many of the last axes the bias has

    def setup(self) -> None:
        weight = Weight(self.initializer, self.shape, self.dtype, self.names)
        self.kernel = boxed_parameter(self, "kernel", weight, self.layout)
        if self.biased:
            shape, names = self.shape[-self.biased :], self.names[-self.biased :]
            names = ("norm",) if names == ("embed",) else names  # whole, as a scale
            zeros = Weight(nn.initializers.zeros, shape, self.dtype, names)
            self.bias = boxed_parameter(self, "bias", zeros, self.layout)

    def __call__(self) -> Array:
        return self.kernel

    def added(self) -> Array | None:
        """The bias, if there is one."""
        return self.bias if self.biased else None
