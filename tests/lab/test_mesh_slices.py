"""Meshes over several slices of a TPU, or several hosts: what crosses the slow network."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.mesh import AXES, MeshConfig, make_mesh


@dataclass(frozen=True)
class Device:
    """What a mesh reads of a device."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "tpu"


@dataclass(frozen=True)
class Chip(Device):
    """A chip of a TPU, which has links to its neighbours."""

    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    device_kind: str = "TPU v6 lite"


def grid(mesh: str, dcn: str, devices: list[Any]) -> np.ndarray:
    return make_mesh(MeshConfig.parse(mesh), devices, dcn=MeshConfig.parse(dcn)).devices


# Eight hosts in four slices, given in no order.
SLICES = [Device(number, number // 2, number // 4) for number in (*range(8, 16), *range(8))]
HOSTS = [Device(number, number // 4, platform="gpu") for number in range(16)]


@pytest.mark.parametrize("devices", [SLICES, HOSTS], ids=["slices", "hosts"])
@pytest.mark.parametrize(
    ("mesh", "dcn"),
    [
        ("data=4,fsdp=4", "data=4"),
        ("stage=4,fsdp=4", "stage=4"),
        ("data=2,stage=4,tensor=2", "data=2,stage=2"),
        ("stage=2,fsdp=8", "stage=2,fsdp=2"),
    ],
)
def test_only_what_dcn_names_crosses_slices(devices: list[Any], mesh: str, dcn: str) -> None:
    """A step along an axis changes the slice where it enters another part of dcn, else never."""
    sizes, parts = MeshConfig.parse(mesh).sizes(), MeshConfig.parse(dcn).sizes()
    placed = grid(mesh, dcn, devices)
    assert placed.shape == tuple(sizes.values())
    assert {device.id for device in placed.flat} == set(range(16))
    slice_of: dict[tuple[int, ...], int] = {}
    for at in product(*map(range, placed.shape)):
        part = tuple(
            place * parts[axis] // sizes[axis] for axis, place in zip(AXES, at, strict=True)
        )
        device = placed[at]
        number = device.process_index if device.slice_index is None else device.slice_index
        assert slice_of.setdefault(part, number) == number
    assert sorted(slice_of.values()) == [0, 1, 2, 3]


def board(slice_index: int) -> list[Chip]:
    """A slice of 4 × 4 chips on four hosts, in the order in which JAX gives them: host by host."""
    corners = product((0, 2), (0, 2))
    chips = [(x + i, y + j, 0) for x, y in corners for j in (0, 1) for i in (0, 1)]
    return [
        Chip(16 * slice_index + number, number // 4, slice_index, coords=at)
        for number, at in enumerate(chips)
    ]


@pytest.mark.parametrize(
    ("mesh", "dcn"), [("stage=4,fsdp=4", ""), ("data=2,stage=4,fsdp=4", "data=2")]
)
def test_neighbours_along_an_axis_are_linked(mesh: str, dcn: str) -> None:
    devices = board(0) if not dcn else [*board(1), *board(0)]
    stages = make_mesh(MeshConfig.parse(mesh), devices, dcn=MeshConfig.parse(dcn) if dcn else None)
    for copy in stages.devices.reshape(-1, 4, 4):
        at = np.array([[device.coords for device in row] for row in copy])
        for axis in (0, 1):
            assert (np.abs(np.diff(at, axis=axis)).sum(-1) == 1).all()
            apart = np.abs(np.take(at, 0, axis) - np.take(at, -1, axis))
            assert (apart.sum(-1) == 3).all(), "the last is linked to the first, round the torus"


def test_a_part_of_a_slice_is_taken_in_the_order_given() -> None:
    devices = board(0)[::2]
    placed = make_mesh(MeshConfig(stage=2, fsdp=4), devices).devices
    assert [*placed.flat] == devices


def test_slices_of_the_tpu_compiler() -> None:
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        topology = topologies.get_topology_desc("v5p:2x2x1", "tpu", num_slices=2)
    except Exception as error:  # what a machine without libtpu raises depends on the version
        pytest.skip(f"the TPU compiler is not installed: {error}")
    placed = grid("data=2,stage=2,fsdp=2", "data=2", topology.devices)
    for copy in range(2):
        assert {device.slice_index for device in placed[copy].flat} == {copy}


def test_other_wrong_arguments() -> None:
    config = MeshConfig(data=2)
    with pytest.raises(InputError, match="name one device twice"):
        make_mesh(config, [SLICES[0]] * 2)
    with pytest.raises(InputError, match=r"dcn='data=2' is no MeshConfig; write MeshConfig"):
        make_mesh(config, SLICES[:2], dcn="data=2")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sharding='Auto' is not known"):
        make_mesh(config, SLICES[:2], sharding="Auto")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "dcn", "words"),
    [
        (
            "data=4,fsdp=4",
            "data=3",
            "mesh axis data=4 does not divide into dcn data=3 parts; choose one of: 1, 2, 4",
        ),
        ("data=4,fsdp=4", "data=2", "dcn data=2 needs 2 slices of 8 devices, and there are 4 of 4"),
        ("data=4,fsdp=4", "data=1", "dcn of one part needs 1 slice of 16 devices, and there are 4"),
        ("data=8,fsdp=2", "data=8", "dcn data=8 needs 8 slices of 2 devices, and there are 4 of 4"),
    ],
)
def test_what_does_not_fit(mesh: str, dcn: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        grid(mesh, dcn, SLICES)
