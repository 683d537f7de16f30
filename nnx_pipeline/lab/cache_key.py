"""Names for what was compiled: equal only where the compiler would be given the same again."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform as machine
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax

import nnx_pipeline
from nnx_pipeline.lab.platform import Platform

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "libtpu"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
)
ENVIRONMENT = ("XLA_", "JAX_", "LIBTPU_", "TPU_", "FLAX_")
# What `Platform.devices` sets itself; the number of devices is that of the mesh.
SET_ALONG_THE_WAY = ("jax_platforms", "jax_num_cpu_devices")


class Unnamed(Exception):
    """A value that no text tells apart from every other, such as a function within a function."""


def key_of(platform: Platform, *values: Any) -> str | None:
    """A hash of the values and of all else that decides what a compiler makes of them.

    That is the platform, the versions of the packages, Python, the source of `nnx_pipeline`, flags
    in the environment, in `jax.config` and `flax.config`, and the CPU, which the CPU compiler asks
    for what it can. None where a value has no text of its own, and on `local`, whose driver is
    not known.
    """
    if platform.kind == "local":
        return None
    try:
        parts = [str(platform), platform.gemm, *map(text_of, values)]
    except Unnamed:
        return None
    # Lines of source stand in the results by their whole path, so another checkout has its own.
    parts += [_packages(), str(Path(nnx_pipeline.__file__).parent), source(), *_flags()]
    if platform.kind == "cpu":
        parts.append(_cpu())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def text_of(value: Any) -> str:
    """The value as text: type and fields of a dataclass, module and name of a function.

    Raises Unnamed for a function that is not to be found under its name in this package, whose
    source no hash covers, and for values of other types.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        fields = ", ".join(f"{name}={text_of(item)}" for name, item in pairs)
        return f"{_found(type(value))}({fields})"
    if callable(value):
        return _found(value)
    raise Unnamed(f"{type(value).__name__} has no text")


def _found(value: Callable[..., Any]) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    ours = f"{module}.".startswith("nnx_pipeline.")
    if ours and getattr(importlib.import_module(module), name, None) is value:
        return f"{module}.{name}"
    raise Unnamed(f"{module}.{name} is not a name of this package")


@functools.cache
def source() -> str:
    """A hash of all source files of this package, and of the GPUs that it describes."""
    digest = hashlib.sha256()
    root = Path(nnx_pipeline.__file__).parent
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.txtpb"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def _packages() -> str:
    installed = {}
    for distribution in PACKAGES:
        try:
            installed[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            installed[distribution] = "none"
    return f"{installed} python {machine.python_version()}"


def _flags() -> tuple[str, ...]:
    environment = {name: text for name, text in os.environ.items() if name.startswith(ENVIRONMENT)}
    options = {
        name: str(value)
        for name, value in jax.config.values.items()
        if name not in SET_ALONG_THE_WAY
    }
    of_flax = {name: getattr(flax.config, name) for name in dir(flax.config) if "flax_" in name}
    return tuple(str(sorted(found.items())) for found in (environment, options, of_flax))


@functools.cache
def _cpu() -> str:
    """What this CPU can, as far as the system says, and how many there are to split work over."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux: the architecture must do
    return f"{machine.machine()} {os.cpu_count()} {flags}"
