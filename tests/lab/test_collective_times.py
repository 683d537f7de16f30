"""Collectives on links, between hosts and between slices, each beside a sum by hand."""

import dataclasses
import re
from pathlib import Path

import pytest
from helpers import missing

from nnx_pipeline.lab._hlo.cost import collective_counts, uncounted_transfers
from nnx_pipeline.lab._hlo.dataflow import collective
from nnx_pipeline.lab._hlo.loops import executions
from nnx_pipeline.lab._hlo.module import Instruction, parse
from nnx_pipeline.lab._hlo.slices import slices_joined
from nnx_pipeline.lab._timing.devices import DEVICES
from nnx_pipeline.lab._timing.estimate import Estimate
from nnx_pipeline.lab._timing.links import Links
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.mesh import MeshConfig, divided_over, make_mesh

pytestmark = pytest.mark.numbers

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
MB, GB, US = 1e6, 1e9, 1e-6

# An array of 64 MB: the result of each kind, but for the reduce-scatter, whose result is a part of
# it. Rates in GB/s each way, by the data sheets: NVLink 4 of an H100 450 and its card 50 (of
# 400 Gb/s); NVLink 5 of a B200 900, card 50; Infinity Fabric of an MI300X 64 to each of seven
# others, card 50; six links of a v5p and of a tpu7x 100 each, and 50 Gb/s of the data-centre
# network for a v5p and for each half of a tpu7x; 600 between these halves. A step of a ring takes
# 5 µs on a GPU and 1 on a TPU.
BY_HAND = {
    # 8 GPUs, a ring of 7 steps: 7 of 8 parts of 8 MB come in.
    "cuda:h100:8": (56 / 450e3, 56 / 450e3, 112 / 450e3, 56 / 450e3, 64 / 450e3),
    "cuda:b200:8": (56 / 900e3, 56 / 900e3, 112 / 900e3, 56 / 900e3, 64 / 900e3),
    # All seven links at once, and one for a permutation.
    "rocm:mi300x:8": (8 / 64e3, 8 / 64e3, 16 / 64e3, 8 / 64e3, 64 / 64e3),
    # Two hosts. Within: 7 × 8 MB for each GPU as above, of an all-to-all 7 × 4 MB. Between: the
    # other half of what the 8 cards of a host share, 4 MB each; of an all-to-all 32 MB each.
    "cuda:h100:2x8": (56 / 450e3, 56 / 450e3, 112 / 450e3, 32 / 50e3, 64 / 50e3),
    "cuda:b200:2x8": (4 / 50e3, 4 / 50e3, 8 / 50e3, 32 / 50e3, 64 / 50e3),
    "rocm:mi300x:2x8": (8 / 64e3, 8 / 64e3, 16 / 64e3, 32 / 50e3, 64 / 50e3),
    # Three lines of two with ends: three links of each chip carry 56 MB. Of an all-to-all 4 chips
    # send half of 64 MB over the 4 links in the middle. A permutation has one link for each pair.
    "tpu:v5p:2x2x2": (56 / 300e3, 56 / 300e3, 112 / 300e3, 128 / 400e3, 64 / 100e3),
    # 4 chips of two devices. Each device gets 3 of 4 parts of half the array, over half of two
    # links; the other half, 32 MB, comes from its neighbour at 600. An all-to-all sends half of 64
    # MB of 4 devices over 2 links; in a permutation both devices of a chip share one.
    "tpu:tpu7x:2x2x1": (24 / 100e3, 24 / 100e3, 48 / 100e3, 128 / 200e3, 128 / 100e3),
    # Each device with its counterpart on the other slice.
    "tpu:v5p:2x2x2*2": (32 / 6.25e3, 32 / 6.25e3, 64 / 6.25e3, 32 / 6.25e3, 64 / 6.25e3),
    "tpu:tpu7x:2x2x1*2": (32 / 6.25e3, 32 / 6.25e3, 64 / 6.25e3, 32 / 6.25e3, 64 / 6.25e3),
}
# Steps of a ring, twice as many for an all-reduce; a permutation is one.
STEPS = {
    **dict.fromkeys(("cuda:h100:8", "cuda:b200:8", "rocm:mi300x:8"), 7 * 5),
    **dict.fromkeys(("cuda:h100:2x8", "cuda:b200:2x8", "rocm:mi300x:2x8"), (7 + 1) * 5),
    **{"tpu:v5p:2x2x2": 3, "tpu:tpu7x:2x2x1": 2 + 1},
    **{"tpu:v5p:2x2x2*2": 1, "tpu:tpu7x:2x2x1*2": 1},
}


def by_hand(platform: str, kind: str) -> float:
    """Seconds."""
    step = 1 if platform.startswith("tpu") else 5
    steps = {"all-reduce": 2 * STEPS[platform], "collective-permute": step}
    return BY_HAND[platform][KINDS.index(kind)] + steps.get(kind, STEPS[platform]) * US


def links_of(platform: str) -> Links:
    kind, target, topology = platform.split(":")
    device, shape = DEVICES[kind, target], topology.partition("*")[0]
    if kind == "tpu":
        places = [(*at,) for at in _grid(*map(int, shape.split("x")), *[2] * (device.cores > 1))]
        return Links(device, tuple(map(int, shape.split("x"))), tuple(places))
    *hosts, gpus = map(int, shape.split("x"))
    number = (hosts or [1])[0] * gpus
    return Links(
        device,
        (number,),
        tuple((n,) for n in range(number)),
        tuple(n // gpus for n in range(number)),
    )


def _grid(*sizes: int) -> list[tuple[int, ...]]:
    if not sizes:
        return [()]
    return [(first, *rest) for first in range(sizes[0]) for rest in _grid(*sizes[1:])]


def estimated(platform: str, kind: str) -> float | None:
    links = links_of(platform)
    devices, slices = len(links.places), 2 if "*" in platform else 0
    size = 64 * MB / ((slices or devices) if kind == "reduce-scatter" else 1)
    if slices:
        return links.takes(recv('"{1,2}x{0:7}"'), kind, int(size))
    if kind == "collective-permute":
        far = devices // 2  # to the other host, or to the next chip along the first dimension
        pairs = tuple((n, (n + far) % devices) for n in range(devices))
        return links.seconds(kind, int(size), pairs)
    return links.seconds(kind, int(size), (tuple(range(devices)),))


def recv(target: str) -> Instruction:
    attributes = {"frontend_attributes": f"{{_xla_megascale_target={target}}}"}
    return Instruction("r", "recv", (), (), "", attributes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", BY_HAND)
def test_by_hand(platform: str, kind: str) -> None:
    assert estimated(platform, kind) == pytest.approx(by_hand(platform, kind), rel=1e-9)


def test_the_document_has_these() -> None:
    text = (Path(__file__).parents[2] / "docs" / "figures.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+:[\w-]+:[\dx*]+)` \|(.*)\|$", text, re.MULTILINE)
    assert {platform for platform, _ in rows} == set(BY_HAND)
    for platform, cells in rows:
        shown = [float(cell.replace(",", "")) for cell in cells.split("|")]
        assert shown == [round(by_hand(platform, kind) / US) for kind in KINDS], platform


def test_a_group_lies_on_the_hosts_of_its_devices() -> None:
    """In whatever order: two devices of one host, or of two."""
    h100 = DEVICES["cuda", "h100"]
    places = tuple((number,) for number in range(4))
    turned = Links(h100, (2, 2), places, hosts=(0, 1, 0, 1))
    size = 8 * 10**6
    assert turned.seconds("all-gather", size, ((0, 2),)) == pytest.approx(4 * MB / 450e9 + 5 * US)
    assert turned.seconds("all-gather", size, ((0, 1),)) == pytest.approx(4 * MB / 50e9 + 5 * US)
    moved = turned.seconds("collective-permute", size, ((0, 2), (1, 0), (3, 3)))
    assert moved == pytest.approx(8 * MB / 50e9 + 5 * US)


def test_devices_of_one_chip_have_their_own_link() -> None:
    links = links_of("tpu:tpu7x:2x2x1")
    neighbours = tuple((n, n + 1) for n in range(0, 8, 2))
    gathered = links.seconds("all-gather", 8 * 10**6, neighbours)
    assert gathered == pytest.approx(4 * MB / 600e9 + US)
    pairs = tuple(pair for one, other in neighbours for pair in ((one, other), (other, one)))
    moved = links.seconds("collective-permute", 8 * 10**6, pairs)
    assert moved == pytest.approx(8 * MB / 600e9 + US)
    # One device of each chip: the others are a group too, and take half of the links.
    ones = (tuple(range(0, 8, 2)), tuple(range(1, 8, 2)))
    assert links.seconds("all-gather", 8 * 10**6, ones) == pytest.approx(6 * MB / 100e9 + 2 * US)


def test_links_of_which_nothing_is_known() -> None:
    rtx = links_of("cuda:rtx-pro-6000:2x8")
    assert rtx.seconds("all-gather", 8, (tuple(range(16)),)) is None
    assert rtx.seconds("collective-permute", 8, ((7, 8),)) is None
    assert rtx.seconds("all-gather", 8, (tuple(range(8)), tuple(range(8, 16)))) is not None
    assert rtx.seconds("all-gather", 8, ((0, 16),)) is None  # a device that is not there
    unread = recv("{100000,200000}")
    assert links_of("tpu:v5p:2x2x2*2").takes(unread, "all-gather", 8) is None


@pytest.mark.parametrize(
    ("target", "slices"),
    [
        ('"{1,2}x{0:3}"', 2),
        ('"{1:4}x{0:3}"', 4),
        ('"{1:2,5}x{0,2}"', 3),
        ("{{100000,100002,200000,200002},{100001,100003,200001,200003}}", 2),
        ("{{100000->200000},{200000->100000},{300001->100001}}", 2),
        ("[2]<=[2]", None),
    ],
)
def test_slices_that_a_collective_joins(target: str, slices: int | None) -> None:
    assert slices_joined(recv(target)) == slices


# 2 MB are summed over the network while the links gather 4 MB twice and 500 cycles run.
_CROSSING = (
    "is_host_transfer=true, frontend_attributes={"
    '_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)
BETWEEN = f"""HloModule between, num_partitions=2

ENTRY %main (x: f32[500000]) -> f32[500000] {{
  %x = f32[500000]{{0}} parameter(0)
  %token = token[] after-all()
  %send = (f32[500000]{{0}}, u32[], token[]) send(%x, %token), channel_id=1, {_CROSSING}
  %recv = (f32[500000]{{0}}, u32[], token[]) recv(%token), channel_id=2, {_CROSSING}
  %g = f32[1000000]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %h = f32[1000000]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %n = f32[500000]{{0}} negate(%x), backend_config={{"estimated_cycles":"500"}}
  %sent = token[] send-done(%send), channel_id=1
  %got = (f32[500000]{{0}}, token[]) recv-done(%recv), channel_id=2
  ROOT %r = f32[500000]{{0}} get-tuple-element(%got), index=0
}}
"""
SIMPLE = dataclasses.replace(
    DEVICES["tpu", "v5p"], clock=1e6, link=4e9, network=1e9, launch=0.0, closes_at=4
)


def between(text: str) -> Estimate:
    module = parse(text)
    return Estimate(module, executions(module), Links(SIMPLE, (2,), ((0,), (1,))))


def test_slices_exchange_beside_links_and_compute() -> None:
    found = between(BETWEEN)
    time = found.time
    # Twice 2 MB at 4 GB/s, 500 cycles at 1 MHz, and beside them 2 × (1/2) × 2 MB at 1 GB/s.
    assert time.compute_seconds == pytest.approx(0.5e-3)
    assert time.collective_seconds == pytest.approx(2 * 0.5e-3 + 2e-3)
    assert time.exposed_seconds == pytest.approx(2 * 0.5e-3 + 0.5e-3)
    assert time.step_seconds == pytest.approx(2e-3)  # the network is the last to end
    assert time.is_partial
    assert [one.reason for one in found.bounds] == [
        "the network between slices counts at its nominal rate"
    ]
    counts = collective_counts(found.module)
    assert counts["all-reduce"] == {"ops": 1, "executed": 1, "bytes": 2_000_000}
    assert counts["all-gather"]["ops"] == 2
    assert collective(found.module.computations["main"].instructions["recv"]) == "all-reduce"


def test_an_exchange_of_another_kind_is_named() -> None:
    found = between(BETWEEN.replace("ALL_REDUCE", "TWO_TO_TWO"))
    assert found.time.step_seconds is None
    assert {one.name for one in found.unread} == {"send", "recv"}
    named = uncounted_transfers(found.module, executions(found.module))
    assert {one.name for one in named} == {"send", "recv"}


def test_axes_that_cross_hosts() -> None:
    if missing("jax_cuda13_plugin"):
        pytest.skip("the extra cuda is not installed")
    devices = Platform.parse("cuda:h100:4x2").devices(1)
    mesh = make_mesh(MeshConfig(data=4, fsdp=2), devices)
    assert divided_over(mesh) == {"data": 4}
    config = MeshConfig.parse("stage=4,fsdp=2", dcn="stage=2,fsdp=2")
    mesh = make_mesh(config, devices)
    assert divided_over(mesh) == {"stage": 2, "fsdp": 2}
    assert Links.of(DEVICES["cuda", "h100"], "4x2", [*mesh.devices.flat]).hosts == tuple(
        device.process_index for device in mesh.devices.flat
    )


@pytest.mark.skipif(missing("libtpu"), reason="the extra tpu is not installed")
def test_places_of_the_devices_of_a_slice() -> None:
    devices = Platform.parse("tpu:tpu7x:2x2x1*2").devices(1)
    mesh = make_mesh(MeshConfig.parse("fsdp=16", dcn="fsdp=2"), devices)
    links = Links.of(DEVICES["tpu", "tpu7x"], "2x2x1*2", [*mesh.devices.flat])
    assert sorted(links.places) == _grid(2, 2, 1, 2)
    assert links.hosts == ()
