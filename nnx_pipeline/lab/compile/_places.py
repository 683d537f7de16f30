"""Where the arguments of a user's function lie: on a mesh of any devices, or on one device."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_pipeline.lab.errors import InputError, divides, nearest
from nnx_pipeline.lab.mesh import Axes, MeshConfig, is_trivial, make_mesh, spec_axes

AnyMesh = Mesh | AbstractMesh | MeshConfig | Axes | str | None


def mesh_on(mesh: AnyMesh, devices: Sequence[jax.Device]) -> Mesh | None:
    """A JAX mesh with the axes of `mesh` over the devices, in auto mode where that is a
    `MeshConfig`, or a text that does not say `explicit:`. Raises InputError for what is no mesh,
    and when there are not enough devices."""
    if isinstance(mesh, str):
        mesh = Axes.parse(mesh)
    if isinstance(mesh, MeshConfig | Axes):
        # A program for one device may be compiled for a topology of many, of which `make_mesh`
        # would refuse to leave some out.
        alone = devices[:1] if mesh.num_devices == 1 else devices
        return make_mesh(mesh, alone, sharding=getattr(mesh, "sharding", "auto"))
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise InputError(
            f"mesh={mesh!r} is no mesh; give a mesh of JAX, a MeshConfig, or a text such as "
            "'dp=2,tp=4'"
        )
    sizes, needed = tuple(mesh.shape.values()), mesh.size
    if len(devices) < needed:
        raise InputError(f"the mesh needs {needed} devices and there are {len(devices)}")
    grid = np.asarray(list(devices[:needed])).reshape(sizes)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def memory_kind(leaf: Any) -> str | None:
    """The kind of memory that an array's sharding names; None for the memory of the device."""
    sharding: Any = getattr(leaf, "sharding", None)
    kind: str | None = getattr(sharding, "memory_kind", None)
    if kind in (None, "device"):
        return None
    # Older versions of JAX name a kind for arrays in the default memory of a CPU.
    if isinstance(leaf, jax.Array):
        (device, *_) = sharding.device_set
        kind = None if kind == device.default_memory().kind else kind
    return kind


def placed_on(leaf: Any, mesh: Mesh | None, device: jax.Device) -> jax.sharding.Sharding:
    """The leaf's sharding on `mesh` in the place of its own mesh, or on `device` without one."""
    sharding = getattr(leaf, "sharding", None)
    spec, own = P(), dict[str, int]()
    if isinstance(sharding, NamedSharding):
        spec, own = sharding.spec, sharding.mesh.shape
    kind = _known_kind(memory_kind(leaf), device)
    if mesh is None:
        if not is_trivial(spec):
            raise InputError("an argument is sharded over a mesh and none is given; give mesh=")
        if kind is None:
            return jax.sharding.SingleDeviceSharding(device)
        mesh = Mesh(np.asarray([device]), ("device",))
    _check_axes(leaf.shape, spec, own, mesh.shape)
    placed = NamedSharding(mesh, spec, memory_kind=kind)
    if placed.memory_kind == kind or kind is None:
        return placed
    # Devices of the NVIDIA topology list no memories, so JAX drops the kind; on an abstract mesh,
    # which has no devices, JAX keeps it.
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=kind)


def check_places(arguments: object, mesh: Mesh | AbstractMesh) -> None:
    """Raises InputError unless arrays are sharded over axes of a mesh, of the same sizes."""
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            _check_axes(leaf.shape, sharding.spec, sharding.mesh.shape, mesh.shape)


def _check_axes(
    shape: Sequence[int], spec: P, own: Mapping[str, int], sizes: Mapping[str, int]
) -> None:
    """Raises InputError unless the axes of a spec have the same `sizes` as on the mesh that it is
    for, and split an array of this shape."""
    for axis in sorted(spec_axes(spec)):
        if axis not in sizes:
            raise InputError(
                f"an argument is sharded over the mesh axis {axis!r}, and the mesh has "
                f"{', '.join(sizes)}; name one of these, or in Python give a mesh of JAX that has "
                "this axis"
            )
        if own[axis] != sizes[axis]:
            # Else an argument would be in other pieces than it says, and nobody would see it.
            raise InputError(
                f"an argument is sharded over {axis}={own[axis]}, and the mesh has "
                f"{axis}={sizes[axis]}; give both the same size"
            )
    check_splits("an argument", shape, spec, sizes)


def check_splits(
    what: str, shape: Sequence[int], entries: Iterable[object], sizes: Mapping[str, int]
) -> None:
    """Raises InputError unless each axis of an array splits evenly over its axes of the mesh."""
    for size, entry in zip(shape, entries, strict=False):
        names = sorted(spec_axes(P(entry)))
        over = ",".join(f"{name}={sizes[name]}" for name in names)
        rule = f"{what}: an axis of {size} does not split over {over} of the mesh"
        divides(math.prod(sizes[name] for name in names), size, rule=rule)


def _known_kind(kind: str | None, device: jax.Device) -> str | None:
    """The kind of memory as it is; raises InputError if the device has no memory of this kind."""
    if kind is None:
        return None
    # Devices of the NVIDIA topology list no memories: they are taken to have these two.
    kinds = [memory.kind for memory in device.addressable_memories()] or ["device", "pinned_host"]
    if kind not in kinds:
        raise InputError(
            f"an argument is in memory of the kind {kind!r}, which {device.device_kind} lacks; "
            f"{nearest(kind, kinds)}"
        )
    return kind
