"""The device mesh: its axis sizes, which need no JAX, and the JAX mesh made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nnx_pipeline.lab.errors import InputError, counted, is_divisor, nearest, one_of

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P


class _Sized:
    """What `MeshConfig` and `Axes` have in common."""

    dcn: Any  # the same for the data-centre network, or None

    def sizes(self) -> dict[str, int]:
        """Every axis with its size, in the order of the mesh axes."""
        raise NotImplementedError

    @property
    def num_devices(self) -> int:
        """How many devices the mesh needs."""
        return math.prod(self.sizes().values())

    def _check(self) -> None:
        for name, size in self.sizes().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"mesh axis {name}={size!r} is not a whole number of 1 or more")
        for name, parts in self.dcn.sizes().items() if self.dcn is not None else ():
            if name not in self.sizes():
                raise InputError(
                    f"dcn {self.dcn}: the mesh has no axis {name!r}; {nearest(name, self.sizes())}"
                )
            size = self.sizes()[name]
            rule = f"mesh axis {name}={size} does not divide into dcn {name}={parts} parts"
            is_divisor(parts, size, rule=rule)

    def __str__(self) -> str:
        shown = [f"{name}={size}" for name, size in self.sizes().items() if size > 1]
        over = f" with dcn {self.dcn}" if self.dcn is not None else ""
        return (",".join(shown) or "one device") + over


@dataclass(frozen=True, kw_only=True)
class MeshConfig(_Sized):
    """How many devices each mesh axis has; an axis that is left out has one. The axes are those
    that the models of this package know; `Axes` has any others.

    Raises InputError for a size that is not a whole number of 1 or more, and for a `dcn` that is no
    MeshConfig.
    """

    data: int = 1
    """Copies of the model, each with its own part of the batch."""

    stage: int = 1
    """Pipeline stages, between which the layers are split."""

    fsdp: int = 1
    """Splits parameters and batch; weights are gathered where they are used."""

    tensor: int = 1
    """Splits attention heads, hidden units and the vocabulary."""

    expert: int = 1
    """Splits the experts; outside the expert layers it splits the batch."""

    context: int = 1
    """Splits the sequence. Attention does not support it yet, so models need `context=1`."""

    dcn: MeshConfig | None = None
    """How each axis is divided over the data-centre network, see `make_mesh`."""

    def __post_init__(self) -> None:
        if self.dcn is not None and not isinstance(self.dcn, MeshConfig):
            raise InputError(f"dcn={self.dcn!r} is no MeshConfig; write MeshConfig(data=2)")
        self._check()

    @classmethod
    def parse(cls, text: str, *, dcn: str = "") -> MeshConfig:
        """Reads text such as `stage=4,fsdp=2`; empty text means one device.

        - `dcn`: the same for the data-centre network, such as `data=2`; empty for none.

        Raises InputError for an unknown axis, an axis named twice, and a size that is not a whole
        number of 1 or more.
        """
        mesh = cls(**_parsed(text, "mesh", AXES))
        divided = cls(**_parsed(dcn, "dcn", AXES)) if dcn.strip() else None
        return dataclasses.replace(mesh, dcn=divided)

    def sizes(self) -> dict[str, int]:
        """Every axis with its size, in the order of the mesh axes."""
        return {name: getattr(self, name) for name in AXES}

    def product(self, *axes: str) -> int:
        """The product of the sizes of these axes."""
        return math.prod(getattr(self, axis) for axis in axes)


AXES = tuple(axis.name for axis in dataclasses.fields(MeshConfig) if axis.name != "dcn")


EXPLICIT = "explicit:"  # before the axes of a text, which are in auto mode without it


@dataclass(frozen=True)
class Axes(_Sized):
    """A mesh for any function: its axes by their own names, in order, each with its size."""

    named: Mapping[str, int]

    dcn: Axes | None = None
    """How axes are divided over the data-centre network, see `make_mesh`."""

    sharding: Literal["explicit", "auto"] = "auto"
    """The type of all axes."""

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def parse(cls, text: str, *, dcn: str = "") -> Axes:
        """Reads text such as `dp=4,tp=2`, or `explicit:dp=4,tp=2` for explicit axes.

        - `dcn`: the same for the data-centre network, such as `dp=2`; empty for none.

        Where all names are axes of a `MeshConfig`, the mesh has the rest of these too, with size 1.
        Raises InputError for a name that Python would not take, an axis named twice, a size that
        is not a whole number of 1 or more, and an axis of `dcn` that the mesh lacks.
        """
        is_explicit = text.strip().startswith(EXPLICIT)
        sizes = _parsed(text.strip().removeprefix(EXPLICIT), "mesh")
        if {*sizes} <= {*AXES}:
            sizes = {**sizes, **{name: 1 for name in AXES if name not in sizes}}
        divided = cls(_parsed(dcn, "dcn")) if dcn.strip() else None
        return cls(sizes, divided, "explicit" if is_explicit else "auto")

    def sizes(self) -> dict[str, int]:
        return dict(self.named)

    def __str__(self) -> str:
        return f"{EXPLICIT if self.sharding == 'explicit' else ''}{super().__str__()}"


def _parsed(text: str, what: str, known: Iterable[str] = ()) -> dict[str, Any]:
    """The sizes by axis; any names where none are `known`."""
    sizes: dict[str, int] = {}
    for part in (piece.strip() for piece in text.split(",") if text.strip()):
        name, separator, size = part.partition("=")
        if known and name not in known:
            raise InputError(
                f"{what} {text!r}: a mesh has no axis {name!r}; {nearest(name, known)}"
            )
        if not name.isidentifier():
            raise InputError(f"{what} {text!r}: {name!r} is no name of an axis; write dp=4,tp=2")
        if name in sizes:
            raise InputError(f"{what} {text!r} names {name} twice; name each axis once")
        if not separator or not size.isdecimal() or len(size) > 9 or not int(size):
            raise InputError(
                f"{what} {text!r}: write {name}=N with a whole number of 1 or more, of nine "
                "digits at most"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(
    config: MeshConfig | Axes,
    devices: Sequence[jax.Device] | None = None,
    *,
    sharding: Literal["explicit", "auto"] = "explicit",
    dcn: MeshConfig | Axes | None = None,
) -> Mesh:
    """Makes a JAX mesh with all axes of `config`, of a MeshConfig all six.

    The inner axes, which communicate most, get the shortest links. On a TPU whose chips fill a box,
    `mesh_utils.create_device_mesh` lays the axes along its links. Elsewhere inner axes are close in
    the order of the devices.

    - `config`: the size of each axis.
    - `devices`: None for all devices that JAX sees. In a box of a TPU their order does not matter.
    - `sharding`: the type of all axes, explicit or auto.
    - `dcn`: how each axis is divided over the network between the slices of a TPU, or between hosts
      where all devices are in one slice or none; the rest of an axis stays inside of a slice. None
      takes that of `config`, and where it has none makes no difference between networks. `data` and
      `stage` send the least.

    Raises InputError unless the axes need exactly these devices; of CPU devices some may be left
    over, without `dcn`.
    """
    import jax
    from jax.sharding import AxisType, Mesh

    one_of("sharding", sharding, ("explicit", "auto"))
    devices = list(jax.devices() if devices is None else devices)
    kept: Any = dcn or config.dcn
    dcn = dataclasses.replace(config, dcn=kept).dcn
    has_spare = all(device.platform == "cpu" for device in devices)  # these cost nothing
    if len(devices) < config.num_devices or (len(devices) > config.num_devices and not has_spare):
        virtual = (
            f", or begin with virtual ones: jax_num_cpu_devices={config.num_devices} before JAX "
            f"runs anything, or JAX_NUM_CPU_DEVICES={config.num_devices} in the environment"
        )
        raise InputError(
            f"mesh {config} needs {config.num_devices} devices and there are {len(devices)}; make "
            f"the product of its axes equal to the number of devices{virtual if has_spare else ''}"
        )
    if len({*devices}) < len(devices):
        raise InputError("the devices of a mesh name one device twice; name each once")
    kind = AxisType.Explicit if sharding == "explicit" else AxisType.Auto
    if dcn is None:
        grid = _along_links(devices[: config.num_devices], [*config.sizes().values()])
    else:
        grid = _over_slices(config, devices, dcn)
    return Mesh(grid, tuple(config.sizes()), axis_types=(kind,) * grid.ndim)


def _over_slices(
    config: MeshConfig | Axes, devices: Sequence[jax.Device], dcn: MeshConfig | Axes
) -> np.ndarray:
    import numpy as np

    slices: dict[int, list[jax.Device]] = {}
    for number, device in zip(_networks(devices), devices, strict=True):
        slices.setdefault(number, []).append(device)
    outside = [dcn.sizes().get(axis, 1) for axis in config.sizes()]
    inside = [size // parts for size, parts in zip(config.sizes().values(), outside, strict=True)]
    sizes = sorted({len(one) for one in slices.values()})
    if len(slices) != dcn.num_devices or sizes != [math.prod(inside)]:
        raise InputError(
            f"dcn {dcn if dcn.num_devices > 1 else 'of one part'} needs "
            f"{counted(dcn.num_devices, 'slice')} of {math.prod(inside)} devices, and there are "
            f"{len(slices)} of {' or '.join(map(str, sizes))}; make the product of its axes equal "
            "to the number of slices, or of hosts where there is one slice"
        )
    grid = np.array([_along_links(slices[number], inside) for number in sorted(slices)])
    grid = grid.reshape(*outside, *inside)
    # From (parts of every axis, then rests of every axis) to (part, rest) of each axis in turn.
    order = [at + shift for at in range(len(outside)) for shift in (0, len(outside))]
    return grid.transpose(order).reshape(tuple(config.sizes().values()))


def _networks(devices: Sequence[jax.Device]) -> list[int]:
    """The number of each device's slice, or of its host where there is one slice or none."""
    slices: list[int] = [getattr(device, "slice_index", 0) for device in devices]
    return slices if len({*slices}) > 1 else [device.process_index for device in devices]


def divided_over(mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh that cross slices, or hosts where there is one slice or none, each with
    the number of these along it; none of an empty mesh."""
    import numpy as np

    if mesh.empty:
        return {}
    grid, found = np.array(_networks([*mesh.devices.flat])).reshape(mesh.devices.shape), {}
    for at, (name, size) in enumerate(mesh.shape.items()):
        lines = np.moveaxis(grid, at, -1).reshape(-1, size)
        found[name] = max(len({*line}) for line in lines.tolist())
    return {name: count for name, count in found.items() if count > 1}


def _along_links(devices: Sequence[jax.Device], sizes: Sequence[int]) -> np.ndarray:
    """The devices of one slice; `sizes` has the axis with the most communication last."""
    import numpy as np
    from jax.experimental.mesh_utils import create_device_mesh

    # A GPU has an attribute `coords` too, and no `core_on_chip`.
    if all(hasattr(one, "coords") and hasattr(one, "core_on_chip") for one in devices):
        places = np.array([(*device.coords, device.core_on_chip) for device in devices])
        if len(devices) == math.prod(int(most) + 1 for most in places.max(axis=0)):  # fill a box
            return create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(sizes)


def ambient_mesh() -> MeshConfig:
    """The axis sizes of the mesh that `jax.set_mesh` has set; one device if there is none.

    Raises InputError for a mesh with axes of other names.
    """
    import jax

    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    for name in sizes:
        if name not in AXES:
            raise InputError(f"mesh axis {name!r} is not known; {nearest(name, AXES)}")
    return MeshConfig(**sizes)


def ambient_platform() -> str:
    """The platform that a program is traced for: `cpu`, `tpu` or `gpu`, as JAX names them.

    The ambient mesh decides, also the abstract one without axes that the lab sets; else JAX's
    default.
    """
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def ambient_device_kind() -> str:
    """The kind of device that a program is traced for, such as `AMD Instinct MI300X`."""
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    kind: str = (device or jax.devices()[0]).device_kind
    return kind


def is_trivial(spec: P) -> bool:
    return all(entry is None or entry == () for entry in spec)


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a partition spec names."""
    return (entry,) if isinstance(entry, str) else entry or ()


def spec_axes(spec: P) -> set[str]:
    """The mesh axes that a partition spec uses."""
    return {name for entry in spec for name in entry_axes(entry)}
