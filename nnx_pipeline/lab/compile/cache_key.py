"""Names for what was compiled: equal only where the compiler would be given the same again."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import platform as machine
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax

import nnx_pipeline
from nnx_pipeline.lab.platform import Platform

# What decides a compile on every platform, and what of one alone does: another compiler that is
# installed or set up in the same process must leave a key as it is.
PACKAGES = {
    "": ("jax", "jaxlib", "flax", "optax", "numpy"),
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm"),
}
# Names, or how they begin, of the variables that the compilers, JAX and Flax read.
ENVIRONMENT = {
    "": ("XLA_", "JAX_", "FLAX_"),
    "tpu": ("TPU_", "LIBTPU_", "TF_XLA_FLAGS", "TF_JITRT_FLAGS"),
    "cuda": ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH", "TRITON_"),
}
# What `Platform.devices` sets itself; the number of devices is that of the mesh.
SET_ALONG_THE_WAY = ("jax_platforms", "jax_num_cpu_devices")
_LARGE = 16 * 2**20  # a file above this, such as a library, is known by its size and time


class Unnamed(Exception):
    """A value that no text tells apart from every other, such as a function within a function."""


def key_of(platform: Platform, *values: Any) -> str | None:
    """A hash of the values and of all else that decides what a compiler makes of them.

    That is the platform, the versions of its packages, Python, the source of `nnx_pipeline`, flags
    in the environment, in the files that it names, in `jax.config` and `flax.config`, and the CPU,
    which the CPU compiler asks for what it can. What `Platform.devices` sets counts as set from the
    start, so that the key is the same before and after. None where a value has no text of its own,
    and on `local`, whose driver is not known.
    """
    if platform.kind == "local":
        return None
    try:
        parts = [str(platform), platform.gemm, *map(text_of, values)]
    except Unnamed:
        return None
    # Lines of source stand in the results by their whole path, so another checkout has its own.
    parts += [_packages(platform), str(Path(nnx_pipeline.__file__).parent), source()]
    parts += _flags(platform)
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
def _packages(platform: Platform) -> str:
    installed = {}
    for distribution in _of(PACKAGES, platform):
        try:
            installed[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            installed[distribution] = "none"
    return f"{installed} python {machine.python_version()}"


def _of(table: dict[str, tuple[str, ...]], platform: Platform) -> tuple[str, ...]:
    return table[""] + table.get(platform.kind, ())


def _flags(platform: Platform) -> tuple[str, ...]:
    prefixes = _of(ENVIRONMENT, platform)
    ignored = {name.upper() for name in SET_ALONG_THE_WAY}
    environment = {
        name: [text, *_contents(name, text)]
        for name, text in {**platform.environment, **os.environ}.items()
        if name.startswith(prefixes) and name not in ignored
    }
    options = {
        name: str(value)
        for name, value in jax.config.values.items()
        if name not in SET_ALONG_THE_WAY
    }
    of_flax = {name: getattr(flax.config, name) for name in dir(flax.config) if "flax_" in name}
    return tuple(str(sorted(found.items())) for found in (environment, options, of_flax))


def _contents(name: str, text: str) -> Iterator[str]:
    """What is in the files that a variable names, and in those that these name in turn.

    XLA takes the whole of XLA_FLAGS for the name of a file with flags unless it begins with `-`;
    elsewhere a file is the value of a flag, such as `--flagfile=path`.
    """
    is_path = name == "TPU_LIBRARY_PATH" or (name.endswith("_FLAGS") and text.lstrip()[:1] != "-")
    waiting, seen = [text] if is_path else _values(text), set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            try:
                state, content = _state(Path(path))
            except (OSError, ValueError):
                continue  # no file, so no more than its name
            waiting += _values(content)
            yield f"{path} {state}"


def _values(text: str) -> list[str]:
    """Words and values of flags, but of those that name where the compiler is to write."""
    words = [word.partition("=") for word in re.split(r"[\s\"']+", text)]
    return [value or name for name, _, value in words if name and "dump" not in name]


def _state(path: Path) -> tuple[str, str]:
    """A text that changes with what the path holds, and its content where that may be flags."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    if path.is_dir() or path.stat().st_size > _LARGE:
        found = [(str(file), file.stat()) for file in files]
        return str([(name, one.st_size, one.st_mtime_ns) for name, one in found]), ""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), content.decode(errors="replace")


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
