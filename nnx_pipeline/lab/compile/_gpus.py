"""The GPUs of `gpus.toml`, as XLA's compiler reads a description of one."""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_pipeline.lab.errors import InputError

GPUS = ("cuda", "rocm")  # the makers: NVIDIA and AMD
_OURS = ("hosts_of", "no_model")  # what XLA's compiler is not told


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "gpus.toml").read_text("utf-8"))


def targets(kind: str) -> list[str]:
    """The names of the GPUs of a maker, `cuda` or `rocm`, that can be compiled for."""
    return [name for name, value in _table()[kind].items() if _is_target(value)]


def _is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "device_description_str" in value


def _facts(kind: str, target: str) -> dict[str, Any]:
    """What holds of one GPU: of its maker's section first, then of its own."""
    shared = {name: value for name, value in _table()[kind].items() if not _is_target(value)}
    own = _table()[kind][target]
    info = {**shared["gpu_device_info"], **own["gpu_device_info"]}
    return {**shared, **own, "gpu_device_info": info}


def by_host(kind: str, target: str, topology: str) -> tuple[int, int]:
    """The number of hosts and of GPUs in each.

    - `topology`: such as `4x8`, or the number of all GPUs, which fill one host after the other.

    Raises InputError for more GPUs in a host than there are, and where the last one is not full.
    """
    most = hosts_of(kind, target)
    *hosts, gpus = map(int, topology.split("x"))
    if hosts and gpus <= most:
        return hosts[0], gpus
    if not hosts and (gpus <= most or gpus % most == 0):
        return max(1, gpus // most), min(gpus, most)
    raise InputError(
        f"platform {kind}:{target}:{topology}: {most} GPUs are joined in a host, and {gpus} are no "
        f"whole number of hosts; write for example {kind}:{target}:2x{most}"
    )


def hosts_of(kind: str, target: str) -> int:
    """How many GPUs a host has, or a rack that joins them as a host does."""
    return int(_facts(kind, target)["hosts_of"])


def memory_bytes(kind: str, target: str) -> int:
    return int(_facts(kind, target)["gpu_device_info"]["device_memory_size"])


def description(kind: str, target: str) -> str:
    """The description of a GPU in the text format of XLA's `GpuTargetConfigProto`."""
    facts = _facts(kind, target)
    return _as_text({name: value for name, value in facts.items() if name not in _OURS})


def why_no_model(kind: str, target: str) -> str:
    """Why XLA has no model of the time of a GPU; "" if it has one."""
    return str(_facts(kind, target).get("no_model", ""))


def _as_text(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}{_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f" {{ {_as_text(value)} }}"
    is_enum = value == "ACCELERATED_FEATURES"
    return f': "{value}"' if isinstance(value, str) and not is_enum else f": {value}"
