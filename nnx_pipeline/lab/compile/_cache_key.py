"""Cache keys of compiled programs, equal only where the compiler would get the same input."""

import dataclasses
import functools
import hashlib
import importlib
import os
import platform as machine
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import flax
import jax

from nnx_pipeline.lab._tracing.visits import each_once
from nnx_pipeline.lab.compile._packages import version
from nnx_pipeline.lab.compile.platform import Platform

# The packages that decide a compile: on every platform under "", and on one kind of platform alone.
# Installing or setting up another compiler in the same process must not change a key.
PACKAGES = {
    "": ("jax", "jaxlib", "flax", "optax", "numpy", "qwix"),
    "tpu": ("libtpu",),
    "cuda": (
        *("jax-cuda13-plugin", "jax-cuda13-pjrt"),
        *("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cudnn-cu13"),
    ),
    "rocm": ("jax-rocm7-pjrt",),
}
# Names, or prefixes of names, of the environment variables that the compilers, JAX and Flax read.
ENVIRONMENT = {
    "": ("XLA_", "JAX_", "FLAX_"),
    "tpu": ("TPU_", "LIBTPU_", "TF_XLA_FLAGS", "TF_JITRT_FLAGS"),
    "cuda": ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH", "TRITON_"),
    "rocm": ("ROCM_PATH", "HIP_", "TRITON_"),
}
# JAX options that `Platform.devices` sets itself and that stay out of the key; the mesh gives the
# number of devices.
SET_ALONG_THE_WAY = ("jax_platforms", "jax_num_cpu_devices")
# The package that holds this file, whatever its name: its source decides what a program is.
PACKAGE, ROOT = __name__.partition(".")[0], Path(__file__).parents[2]
_LARGE = 16 * 2**20  # bytes; a larger file, such as a library, is known by its size and time


class Unnamed(Exception):
    """Raised for a value that has no unique name as text, such as a function inside a function."""


def entry_key(platform: Platform, *values: object) -> str | None:
    """A hash of the values (see `key_text`) and of all that decides what a compiler makes of them:
    the versions of the platform's packages and of Python, the source and folder of this package,
    the flags of environment variables and the files that they name, of `jax.config` and
    `flax.config`, and on `cpu` this CPU's features. What `Platform.devices` sets counts as set from
    the start.

    None where a value has no text of its own, and on `local`, whose driver is not known.
    """
    if platform.kind == "local":
        return None
    try:
        parts = [str(platform), platform.gemm, *map(key_text, platform.xla)]
        parts += map(key_text, values)
    except Unnamed:
        return None
    # Results name source lines by their whole path, so another checkout needs keys of its own.
    parts += [packages(platform), str(ROOT), source()]
    parts += _flags(platform)
    if platform.kind == "cpu":
        parts.append(cpu_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def key_text(value: object) -> str:
    """The value as text: a dataclass by its type and fields, a function by its module and name.
    Raises Unnamed for what no hash covers: a function or class that is not found under its name in
    this package, and a value of another type."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(key_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        fields = ", ".join(f"{name}={key_text(item)}" for name, item in pairs)
        return f"{_found(type(value))}({fields})"
    if callable(value):
        return _found(value)
    raise Unnamed(f"{type(value).__name__} has no text")


def _found(value: Callable[..., object]) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    ours = f"{module}.".startswith(f"{PACKAGE}.")
    if ours and getattr(importlib.import_module(module), name, None) is value:
        return f"{module}.{name}"
    raise Unnamed(f"{module}.{name} is not a name of this package")


@functools.cache
def source() -> str:
    """A hash of all source files of this package, and of its tables."""
    digest = hashlib.sha256()
    for path in sorted((*ROOT.rglob("*.py"), *ROOT.rglob("*.toml"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def packages(platform: Platform) -> str:
    installed = {name: version(name) or "none" for name in _of(PACKAGES, platform)}
    return f"{installed} python {machine.python_version()}"


def _of(table: dict[str, tuple[str, ...]], platform: Platform) -> tuple[str, ...]:
    return table[""] + table.get(platform.kind, ())


def _flags(platform: Platform) -> tuple[str, ...]:
    prefixes = _of(ENVIRONMENT, platform)
    ignored = {name.upper() for name in SET_ALONG_THE_WAY}
    # `Platform.devices` sets the variables of the platform that are missing: they count already.
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
    """The path and state of each file that a variable names, and of those that these name in turn.
    XLA takes the whole of XLA_FLAGS as a file of flags unless it begins with `-`; otherwise a file
    is the value of a flag, such as `--flagfile=path`."""
    is_path = name == "TPU_LIBRARY_PATH" or (name.endswith("_FLAGS") and text.lstrip()[:1] != "-")
    waiting = [text] if is_path else _values(text)
    for path in each_once(waiting):
        try:
            state, content = _state(Path(path))
        except (OSError, ValueError):
            continue  # not a file: the value itself is in the key already
        waiting += _values(content)
        yield f"{path} {state}"


def _values(text: str) -> list[str]:
    """The values of flags and the bare words, without flags that say where to write dumps."""
    words = [word.partition("=") for word in re.split(r"[\s\"']+", text)]
    return [value or name for name, _, value in words if name and "dump" not in name]


def _state(path: Path) -> tuple[str, str]:
    """A text that changes with what is at the path, and its content where that may hold flags."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    if path.is_dir() or path.stat().st_size > _LARGE:
        found = [(str(file), file.stat()) for file in files]
        return str([(name, one.st_size, one.st_mtime_ns) for name, one in found]), ""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), content.decode(errors="replace")


@functools.cache
def cpu_text() -> str:
    """The features of this CPU, as far as the system lists them, and the number of CPUs."""
    flags = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux: the architecture must be enough
    return f"{machine.machine()} {os.cpu_count()} {flags}"
