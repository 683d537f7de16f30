"""The mesh as numbers, and as a JAX mesh over given devices."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from nnx_pipeline.errors import InputError, nearest


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis has; an axis left out has one.

    data: copies of the model, each with its own part of the batch.
    stage: slices of the layers, the pipeline.
    fsdp: parameters and batch are split; weights are gathered where they are used.
    tensor: heads and hidden units are split.
    expert: experts are split (outside them it splits the batch).
    context: the sequence is split.
    """

    data: int = 1
    stage: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"mesh axis {name}={size!r} is not a whole number of 1 or more")

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Reads `stage=4,fsdp=2`; the empty text is one device."""
        sizes: dict[str, int] = {}
        for part in (piece.strip() for piece in text.split(",") if text.strip()):
            name, separator, size = part.partition("=")
            if name not in AXES:
                raise InputError(f"mesh {text!r} has no axis {name!r}; {nearest(name, AXES)}")
            if name in sizes:
                raise InputError(f"mesh {text!r} names {name} twice; name each axis once")
            if not separator or not size.isdecimal():
                raise InputError(f"mesh {text!r}: write {name}=N with a whole number of 1 or more")
            sizes[name] = int(size)
        return cls(**sizes)

    def sizes(self) -> dict[str, int]:
        """Every axis with its size, in mesh order."""
        return dataclasses.asdict(self)

    def product(self, *axes: str) -> int:
        """The number of devices along those axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def num_devices(self) -> int:
        """Devices the mesh needs."""
        return math.prod(self.sizes().values())

    def __str__(self) -> str:
        shown = [f"{name}={size}" for name, size in self.sizes().items() if size > 1]
        return ",".join(shown) or "one device"


AXES = tuple(axis.name for axis in dataclasses.fields(MeshConfig))


def make_mesh(
    config: MeshConfig,
    devices: Sequence[Any] | None = None,
    *,
    sharding: Literal["explicit", "auto"] = "explicit",
) -> Mesh:
    """A JAX mesh with all six axes, over `devices` (default: those that JAX sees).

    Neighbours along `stage` are far apart in device order and those along the inner axes close, so
    that the chatty axes get the short links. Raises InputError when the numbers do not agree.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < config.num_devices or (
        len(devices) > config.num_devices and not _spare(devices)
    ):
        raise InputError(
            f"mesh {config} needs {config.num_devices} devices and there are {len(devices)}; "
            "make the product of its axes equal to the number of devices"
        )
    kind = AxisType.Explicit if sharding == "explicit" else AxisType.Auto
    grid = np.array(devices[: config.num_devices]).reshape(tuple(config.sizes().values()))
    return Mesh(grid, AXES, axis_types=(kind,) * len(AXES))


def _spare(devices: Sequence[Any]) -> bool:
    """Virtual CPU devices cost nothing, so a mesh may leave some of them out."""
    return all(device.platform == "cpu" for device in devices)


def ambient_mesh() -> MeshConfig:
    """The sizes of the mesh set by `jax.set_mesh`; one device without one.

    Raises InputError for a mesh with axes of other names.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    for name in sizes:
        if name not in AXES:
            raise InputError(f"mesh axis {name!r} is not known; {nearest(name, AXES)}")
    return MeshConfig(**sizes)
