"""The mesh of a MaxText configuration, and the configuration on another mesh."""

import math
from typing import Any

from linen_compat.maxtext import _keys as keys
from linen_compat.maxtext._values import Fields, Values, as_number
from nnx_pipeline import InputError, MeshConfig

# MaxText's words for the axes that this project has too.
_AXES = {
    **{"data": "data", "pipeline": "stage", "fsdp": "fsdp"},
    **{"tensor": "tensor", "expert": "expert", "context": "context"},
}
# MaxText's own defaults where the file says nothing; all others are 1.
_REST = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}


def mesh_of(raw: Values, devices: int | None, slices: int) -> MeshConfig:
    """The mesh that a configuration asks for.

    - `devices`: how many there are, which a parallelism of -1 needs; None where that is not known.
    - `slices`: of how many slices, or hosts, they are.

    Raises InputError for a -1 that cannot be worked out, and for axes that are not known here.
    """
    inside = _sizes(raw, "ici", None if devices is None else devices // slices)
    between = _sizes(raw, "dcn", slices)
    whole = {axis: inside[axis] * between[axis] for axis in inside}
    dcn = MeshConfig(**between) if math.prod(between.values()) > 1 else None
    return MeshConfig(**whole, dcn=dcn)


def on_mesh(raw: Values, mesh: MeshConfig) -> Fields:
    """The configuration with the parallelisms of a mesh, whatever it said of them."""
    other = {key: value for key, value in raw.items() if not keys.PARALLELISM.fullmatch(str(key))}
    between = mesh.dcn or MeshConfig()
    for word, axis in _AXES.items():
        parts = getattr(between, axis)
        other[f"ici_{word}_parallelism"] = getattr(mesh, axis) // parts
        other[f"dcn_{word}_parallelism"] = parts
    return other


def _sizes(raw: Values, net: str, available: int | None) -> dict[str, Any]:
    """The axes within a slice (`ici`) or between slices (`dcn`), each with its size."""
    given: dict[str, Any] = {**_REST, **raw}
    sizes = {
        key: as_number(key, value, int)
        for key, value in given.items()
        if keys.PARALLELISM.fullmatch(str(key)) and key.startswith(net)
    }
    open_ended = [key for key, size in sizes.items() if size == -1]
    if len(open_ended) > 1:
        raise InputError(f"{' and '.join(open_ended)} are both -1; set one of them to a number")
    for key in open_ended:
        if available is None:
            raise InputError(
                f"{key}=-1 is what is left of the devices; name the mesh by --mesh, "
                "or, where a command takes it, the devices by --platform tpu:v5p:2x2x2"
            )
        others = math.prod(size for size in sizes.values() if size != -1)
        sizes[key] = max(1, available // max(1, others))
    named = {axis: sizes.pop(f"{net}_{word}_parallelism", 1) for word, axis in _AXES.items()}
    if strange := [f"{key}={size}" for key, size in sizes.items() if size != 1]:
        raise InputError(f"{strange[0]}: this project has no such mesh axis; set it to 1")
    return named
