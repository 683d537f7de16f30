"""What the makers of devices say about their speed; devices.toml has the figures and sources."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, above all its speed; rates are per second, of links in one direction."""

    flops: Mapping[str, float] = field(hash=False)  # of products, by HLO dtype and in `tf32`
    halved: tuple[str, ...] = ("s4", "u4", "s8", "u8", "f8e5m2")  # what a TPU multiplies as `s8`
    memory: float  # bytes
    link: float  # bytes of one link; of a switch, what one device sends
    dimensions: int = 0  # of the torus that the links form; 0 for GPUs
    closes_at: int = 1  # a dimension of a multiple of this size is a ring
    has_pairs: bool = False  # each pair of GPUs in a host has a link of its own, else a switch
    cores: int = 1  # how many devices are a chip, and share its links
    between_cores: float = 0.0  # bytes between the devices of a chip
    network: float | None = None  # bytes of one device between hosts, or slices of a TPU
    clock: float | None = None  # cycles; None where the compiler estimates nothing
    host: float  # bytes to or from the memory of the host
    launch: float  # seconds of a collective for each device that it passes
    on_chip: int | None = None  # bytes that a compiler gives to arrays
    unit: int = 1  # rows, and columns, of a matrix unit of a TPU


def _device(facts: dict[str, Any]) -> Device:
    rates = {name: facts.pop(name) * GIGA for name in ("memory", "link", "host")}
    rates |= {name: facts.pop(name) * GIGA for name in _OTHERS & facts.keys()}
    if "clock_ghz" in facts:
        rates["clock"] = facts.pop("clock_ghz") * GIGA
    if "halved" in facts:
        facts["halved"] = tuple(facts["halved"])
    flops = {dtype: rate * TERA for dtype, rate in facts.pop("flops").items()}
    return Device(flops=flops, launch=facts.pop("launch_us") / 1e6, **rates, **facts)


_OTHERS = {"between_cores", "network"}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
DEVICES = {
    (kind, target): _device(facts)
    for kind, those in _TABLE.items()
    for target, facts in those.items()
}


# What JAX calls the devices, where that says which one it is: `NVIDIA H100 PCIe` is another.
_SEEN_AS = {
    "TPU v5": ("tpu", "v5p"),
    "TPU v5 lite": ("tpu", "v5e"),
    "TPU v6 lite": ("tpu", "v6e"),
    "TPU7x": ("tpu", "tpu7x"),
    "NVIDIA A100-SXM4-40GB": ("cuda", "a100-40gb"),
    "NVIDIA A100-SXM4-80GB": ("cuda", "a100-80gb"),
    "NVIDIA H100 80GB HBM3": ("cuda", "h100"),
    "NVIDIA H200": ("cuda", "h200"),
    "NVIDIA B200": ("cuda", "b200"),
}


def device_of(kind: str, target: str) -> Device | None:
    return DEVICES.get((kind, target))


def device_seen_as(name: str) -> Device | None:
    """The device of a `jax.Device.device_kind`; None where that names none of the table."""
    return DEVICES.get(_SEEN_AS.get(name, ("", "")))
