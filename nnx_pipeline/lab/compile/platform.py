"""Platforms to compile for: real devices, virtual CPU devices, or a compiler without devices.

How a compiler works without devices (JAX 0.10 to 0.12): a topology of `libtpu` or of the CUDA
plugin gives device objects from which a mesh can be built. Programs for it can be lowered and
compiled, not run. JAX is imported only where devices are asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_pipeline.lab.compile._settings import (
    TRITON_GEMM,
    Setting,
    check_kind,
    gemm_of,
    parse_settings,
)
from nnx_pipeline.lab.errors import InputError, counted, install, nearest

if TYPE_CHECKING:
    import jax

KINDS = ("cpu", "tpu", "cuda", "local")
CUDA_TARGETS = ("h100", "h200")
GEMMS = ("triton", "cublas")
MOST_CPUS = 4_096  # virtual ones, which JAX makes one after the other
MOST_DEVICES = 2**16  # of a topology: seven times the largest slice, and made within seconds

# Without the first, libtpu asks a metadata server that is not there; the next two name a host and a
# slice so that it does not warn; the last lets several processes compile at the same time.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# The memory of one device in GiB: for a program that is too large the compiler (libtpu 0.0.42.1)
# says "available HBM (95.74G)". A chip of v2, v3 and tpu7x is two devices there.
_TPU_MEMORY = {
    **{"v2": 7.48, "v3": 15.48, "v4": 30.75, "tpu7x": 94.75},
    **{"v5e": 15.75, "v5p": 95.74, "v6e": 31.25},
}
# The slices of a TPU v5p by their number of chips.
_V5P = {
    **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"},
    **{256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"},
}


class MissingCompiler(InputError):
    """Raised when the compiler of a platform is not installed."""


@dataclass(frozen=True)
class Platform:
    """A compiler and the devices it compiles for.

    - `kind`: `cpu`, `tpu`, `cuda`, or `local` for the devices that JAX finds.
    - `target`: the TPU generation, such as `v5p`, or the GPU, such as `h100`.
    - `topology`: the shape of a TPU slice, such as `2x2x2`, or the number of GPUs.
    - `gemm`: what NVIDIA's matrix products become, `triton` or `cublas`. On a device autotuning
      decides between them by trying both; without one the compiler takes Triton.
    - `xla`: settings of the compiler that the user gave; see `with_settings`.
    """

    kind: str
    target: str = ""
    topology: str = ""
    gemm: str = "triton"
    xla: tuple[Setting, ...] = ()

    @classmethod
    def parse(cls, text: str, *settings: str) -> Platform:
        """Reads a platform from a text such as `cpu`, `local`, `tpu:v5p:2x2x2` or `cuda:h100:8`.

        - `settings`: settings of its compiler, `NAME=VALUE` or `@SET` each.

        Raises InputError for any other text, and for a setting that would do nothing there.
        """
        return cls._parsed(text).with_settings(parse_settings(settings))

    @classmethod
    def _parsed(cls, text: str) -> Platform:
        kind, *rest = text.split(":")
        what = f"platform {text!r}"
        if kind not in KINDS:
            cure = "did you mean 'cuda'?" if kind in ("gpu", "nvidia") else nearest(kind, KINDS)
            raise InputError(f"{what} is not known; {cure}")
        if kind in ("cpu", "local"):
            if rest:
                raise InputError(f"{what} takes no target; write {kind}")
            return cls(kind)
        example = "tpu:v5p:2x2x2" if kind == "tpu" else "cuda:h100:8"
        if len(rest) != 2 or not all(rest):
            raise InputError(f"{what} is not complete; write for example {example}")
        target, topology = rest
        if kind == "cuda":
            if target not in CUDA_TARGETS:
                known = ", ".join(CUDA_TARGETS)
                raise InputError(f"{what} has no such GPU; choose one of: {known}")
            if not re.fullmatch(r"[1-9][0-9]{0,5}", topology):
                cure = f"{MOST_DEVICES} at most; write {example}"
                raise InputError(f"{what} needs a number of GPUs, {cure}")
        elif not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){0,3}", topology):
            raise InputError(f"{what} has no topology like 2x2x2; write {example}")
        if math.prod(map(int, topology.split("x"))) > MOST_DEVICES:
            raise InputError(f"{what} has more than {MOST_DEVICES} devices; write {example}")
        return cls(kind, target, topology)

    def with_settings(self, settings: tuple[Setting, ...]) -> Platform:
        """The same platform with these settings of its compiler, as `parse_settings` gives them,
        which win over its own. Raises InputError for a setting that would do nothing on this
        platform."""
        check_kind(settings, self.kind, str(self))
        return replace(self, xla=settings, gemm=gemm_of(settings) or self.gemm)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.kind, self.target, self.topology)))

    @property
    def backend(self) -> str:
        """JAX's name of the platform: `cpu`, `tpu` or `gpu`."""
        if self.kind == "local":
            return str(_local_devices()[0].platform)
        return "gpu" if self.kind == "cuda" else self.kind

    @property
    def is_real(self) -> bool:
        """Whether programs can run on it, rather than only be compiled for it."""
        return self.kind in ("cpu", "local")

    def devices(self, needed: int) -> Sequence[jax.Device]:
        """The devices to compile for.

        - `needed`: how many virtual CPU devices the process must have: on `cpu` they are the
          result, and with a compiler without devices they are there for other work.

        Sets process-wide JAX options, so it must be called before anything runs on a device. Raises
        InputError when the compiler has the wrong version or does not know the topology, and
        MissingCompiler when it is not installed.
        """
        import jax

        if self.kind == "local":
            return _local_devices()
        _use_virtual_cpus(needed)
        if self.kind == "cpu":
            return jax.devices("cpu")
        return _tpu_devices(self) if self.kind == "tpu" else _cuda_devices(self)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that `devices` sets unless they are set already."""
        return dict(_TPU_ENVIRONMENT) if self.kind == "tpu" else {}

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Compiler options that override XLA_FLAGS and the options of a jitted function."""
        own = {TRITON_GEMM: self.gemm == "triton"} if self.kind == "cuda" else {}
        return {**own, **{one.name: one.value for one in self.xla}}

    def memory_bytes(self) -> int | None:
        """Bytes of memory of one device; None where that is not known."""
        if self.kind == "cuda":
            found = re.search(r"device_memory_size: (\d+)", _target_config(self.target))
            return int(found.group(1)) if found else None
        size = _TPU_MEMORY.get(self.target) if self.kind == "tpu" else None
        return None if size is None else int(size * 2**30)

    def versions(self) -> dict[str, str]:
        """The versions of the packages that decide what the compiler does, "" if not installed; of
        the devices that JAX sees also the kind, as the entry `device`."""
        seen = {"device": _local_devices()[0].device_kind} if self.kind == "local" else {}
        names = ["jax", "jaxlib", "flax"]
        of_cuda = ["jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13"]
        names += {"tpu": ["libtpu"], "cuda": of_cuda}.get(self.kind, [])
        return {**seen, **{name: _version(name) for name in names}}


def default_platform(devices: int, *, on_mesh: bool) -> tuple[str, str]:
    """The platform to compile for where none is named, and why. Without a mesh (`on_mesh`) a
    program on one device is for one chip of any slice."""
    why = "as its compiler is installed"
    if _version("libtpu") and _matches(_version("libtpu"), _required("tpu", "libtpu")):
        if topology := _V5P.get(devices if on_mesh or devices > 1 else min(_V5P)):
            return f"tpu:v5p:{topology}", why
        why = f"as no slice of a TPU v5p has {counted(devices, 'device')}"
    if _version("jax-cuda13-plugin") == _version("jax") and _version("nvidia-cuda-nvcc"):
        return f"cuda:h100:{devices}", why
    if why.startswith("as its"):
        why = "as no compiler of an accelerator is installed"
    return "cpu", f"{why}; its figures mislead, so install one: {install('tpu')}"


def _use_virtual_cpus(needed: int) -> None:
    """Makes JAX start with that many virtual CPU devices; InputError if it started with fewer."""
    import jax

    if needed > MOST_CPUS:
        raise InputError(
            f"the mesh needs {needed} virtual CPU devices, of which {MOST_CPUS} are the most; "
            "choose smaller axes"
        )
    try:
        jax.config.update("jax_platforms", "cpu")
        if needed > 1:
            jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        pass  # JAX has started already: its number of devices is fixed, and is checked below.
    have = len(jax.devices("cpu"))
    if have < needed:
        raise InputError(
            f"the mesh needs {needed} virtual CPU devices and this process started with {have}; "
            f"set jax_num_cpu_devices={needed} before JAX runs anything, or JAX_NUM_CPU_DEVICES="
            f"{needed} in the environment"
        )


def _local_devices() -> Sequence[jax.Device]:
    """The devices that JAX sees. JAX logs a plugin that finds none of its kind with a traceback,
    which is left out here, and libtpu asks for a machine that is not there."""
    import jax

    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").exists():
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)

    def without_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True

    log = logging.getLogger("jax._src.xla_bridge")  # the name is JAX's own, and may change
    log.addFilter(without_traceback)
    try:
        return jax.devices()
    finally:
        log.removeFilter(without_traceback)


def _tpu_devices(platform: Platform) -> Sequence[jax.Device]:
    wanted = _required("tpu", "libtpu")
    have = _version("libtpu")
    cure = install("tpu")
    if not have:
        raise MissingCompiler(f"platform {platform} needs libtpu, which is not installed; {cure}")
    if not _matches(have, wanted):
        raise InputError(
            f"platform {platform} needs libtpu{wanted} for jax {_version('jax')} and found {have}, "
            f"whose programs this JAX cannot read back; {cure}"
        )
    for name, value in platform.environment.items():
        os.environ.setdefault(name, value)
    # Where programs run both cores of a v4 are one device; by default the compiler has two.
    chip = {"chip_config_name": "megacore"} if platform.target == "v4" else {}
    name = f"{platform.target}:{platform.topology}"
    return _topology(platform, topology_name=name, **chip)


def _cuda_devices(platform: Platform) -> Sequence[jax.Device]:
    wanted = _version("jax")
    have = _version("jax-cuda13-plugin")
    cure = install("cuda")
    if not have:
        raise MissingCompiler(
            f"platform {platform} needs the CUDA plugin, which is not installed; {cure}"
        )
    if have != wanted:
        raise InputError(
            f"platform {platform} needs jax-cuda13-plugin {wanted}, the version of jax, and found "
            f"{have}; {cure}"
        )
    if not _version("nvidia-cuda-nvcc"):
        raise MissingCompiler(f"platform {platform} needs ptxas and libdevice; {cure}")
    text = _target_config(platform.target)
    return _topology(platform, target_config=text, topology=f"1x1x{platform.topology}")


def _target_config(target: str) -> str:
    targets = importlib.resources.files("nnx_pipeline.lab") / "targets"
    return (targets / f"{target}.txtpb").read_text()


def _topology(platform: Platform, **options: str) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=platform.kind, **options).devices
    except NotImplementedError as error:
        raise InputError(
            f"platform {platform}: its compiler is not available, because JAX started earlier and "
            "found no such device; measure before jax.devices() and other uses of JAX, or set "
            "JAX_PLATFORMS=cpu"
        ) from error
    except Exception as error:  # of many kinds; its first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"platform {platform}: the compiler does not offer this topology ({reason[:160]}); "
            "try one such as tpu:v5p:2x2x2 or cuda:h100:8; for one chip of a TPU give a whole "
            "host, such as tpu:v5p:2x2x1, and no mesh"
        ) from error


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _required(extra: str, package: str) -> str:
    """The version that the installed JAX pins for one of its extras, such as `==0.0.42.*`."""
    for requirement in importlib.metadata.requires("jax") or []:
        name, _, marker = requirement.partition(";")
        if name.strip().startswith(package) and f'"{extra}"' in marker:
            return name.strip()[len(package) :].strip()
    return ""


def _matches(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return not wanted or version in SpecifierSet(wanted)
