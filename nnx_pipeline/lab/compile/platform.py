"""Platforms to compile for: real devices, virtual CPU devices, or a compiler without devices.

JAX is imported only where devices are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nnx_pipeline.lab.compile import _gpus
from nnx_pipeline.lab.compile._gpus import GPUS
from nnx_pipeline.lab.compile._packages import TPU_ENVIRONMENT, matches, required, version
from nnx_pipeline.lab.compile._settings import (
    COST_MODEL,
    TRITON_GEMM,
    Setting,
    check_kind,
    gemm_of,
    parse_settings,
)
from nnx_pipeline.lab.errors import InputError, counted, install, nearest

if TYPE_CHECKING:
    import jax

KINDS = ("cpu", "tpu", *GPUS, "local")
GEMMS = ("triton", "cublas")
MOST_DEVICES = 2**16  # of a topology: seven times the largest slice, and made within seconds

_TWO_CORES = ("v2", "v3", "tpu7x")  # TPUs of which a chip is two devices
# The memory of one device in GiB: for a program that is too large the compiler (libtpu 0.0.42.1)
# says "available HBM (95.74G)".
_TPU_MEMORY = {
    **{"v2": 7.48, "v3": 15.48, "v4": 30.75, "tpu7x": 94.75},
    **{"v5e": 15.75, "v5p": 95.74, "v6e": 31.25},
}
_FLAT = ("v2", "v3", "v5e", "v6e")  # whose slices have two dimensions
# The slices of a TPU v5p by their number of chips.
_V5P = {
    **{4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"},
    **{256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"},
}


_EXAMPLES = {"tpu": "tpu:v5p:2x2x2", "cuda": "cuda:h100:8", "rocm": "rocm:mi300x:8"}


@dataclass(frozen=True)
class Platform:
    """A compiler and the devices it compiles for.

    - `kind`: `cpu`, `tpu`, `cuda`, `rocm`, or `local` for the devices that JAX finds.
    - `target`: the TPU generation, such as `v5p`, or the GPU, such as `h100` or `mi300x`.
    - `topology`: the shape of a TPU slice, such as `2x2x2`, or `2x2x2*2` for two slices; the number
      of GPUs, such as `8`, or of hosts and of GPUs in each, such as `4x8`.
    - `gemm`: what a GPU's matrix products become, `triton` or `cublas` (on AMD hipBLASLt). On a
      device autotuning decides between them by trying both; without one the compiler takes Triton.
    - `xla`: settings of the compiler that the user gave; see `with_settings`.
    """

    kind: str
    target: str = ""
    topology: str = ""
    gemm: str = "triton"
    xla: tuple[Setting, ...] = ()

    @classmethod
    def parse(cls, text: str, *settings: str) -> Platform:
        """Reads a platform from a text such as `cpu`, `local`, `tpu:v5p:2x2x2` or `cuda:h100:4x8`.

        - `settings`: settings of its compiler, `NAME=VALUE` or `@SET` each.

        Raises InputError for any other text, and for a setting that would do nothing there.
        """
        return cls._parsed(text).with_settings(parse_settings(settings))

    @classmethod
    def _parsed(cls, text: str) -> Platform:
        kind, *rest = text.split(":")
        what = f"platform {text!r}"
        if kind not in KINDS:
            meant = {"gpu": "cuda", "nvidia": "cuda", "amd": "rocm"}.get(kind)
            cure = f"did you mean {meant!r}?" if meant else nearest(kind, KINDS)
            raise InputError(f"{what} is not known; {cure}")
        if kind in ("cpu", "local"):
            if rest:
                raise InputError(f"{what} takes no target; write {kind}")
            return cls(kind)
        example = _EXAMPLES[kind]
        if len(rest) != 2 or not all(rest):
            raise InputError(f"{what} is not complete; write for example {example}")
        target, topology = rest
        if kind in GPUS:
            known = _gpus.targets(kind)
            if target not in known:
                begun = [name for name in known if name.startswith(target)]  # such as a100
                cure = f"choose {' or '.join(begun)}" if begun else nearest(target, known)
                raise InputError(f"{what} has no such GPU; {cure}")
            if not re.fullmatch(r"([1-9][0-9]{0,4}x)?[1-9][0-9]{0,5}", topology):
                raise InputError(
                    f"{what} needs a number of GPUs, or of hosts and of GPUs in each such as 4x8, "
                    f"{MOST_DEVICES} at most; write {example}"
                )
            _gpus.by_host(kind, target, topology)
        elif not re.fullmatch(
            r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){0,3}", topology.partition("*")[0]
        ):
            raise InputError(f"{what} has no topology like 2x2x2; write {example}")
        elif not re.fullmatch(r"[^*]*([*]([2-9]|[1-9][0-9]{1,3}))?", topology):
            raise InputError(
                f"{what} needs a number of slices behind *, 2 or more; write {example}*2 for two "
                f"slices of {example.rpartition(':')[2]}"
            )
        if math.prod(map(int, re.split("[x*]", topology))) > MOST_DEVICES:
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
            return str(self.devices(1)[0].platform)
        return "gpu" if self.is_gpu else self.kind

    @property
    def is_gpu(self) -> bool:
        return self.kind in GPUS

    @property
    def size(self) -> tuple[int | None, int]:
        """How many devices it has, None for `cpu` and `local`, and of how many slices or hosts."""
        if not self.topology:
            return None, 1
        shape, _, slices = self.topology.partition("*")
        hosts, by_host, _ = shape.partition("x") if self.is_gpu else ("1", "", "")
        parts = int(slices or 1) * (int(hosts) if by_host else 1)
        each = math.prod(map(int, shape.split("x"))) * self.devices_per_chip
        return each * int(slices or 1), parts

    @property
    def devices_per_chip(self) -> int:
        return 2 if self.target in _TWO_CORES else 1

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
        from nnx_pipeline.lab.compile import _devices

        return _devices.devices(self.kind, self.target, self.topology, needed)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that `devices` sets unless they are set already."""
        return dict(TPU_ENVIRONMENT) if self.kind == "tpu" else {}

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """Compiler options that override XLA_FLAGS and the options of a jitted function."""
        own: dict[str, str | bool] = {}
        if self.is_gpu:
            own[TRITON_GEMM] = self.gemm == "triton"
            if not self.why_a_roofline:
                own[COST_MODEL] = True
        return {**own, **{one.name: one.value for one in self.xla}}

    @property
    def why_a_roofline(self) -> str:
        """Why XLA has no model of the time of this GPU; "" if it has one, and for no GPU."""
        return _gpus.why_no_model(self.kind, self.target) if self.is_gpu else ""

    def memory_bytes(self) -> int | None:
        """Bytes of memory of one device; None where that is not known."""
        if self.is_gpu:
            return _gpus.memory_bytes(self.kind, self.target)
        size = _TPU_MEMORY.get(self.target) if self.kind == "tpu" else None
        return None if size is None else int(size * 2**30)

    def versions(self) -> dict[str, str]:
        """The versions of the packages that decide what the compiler does, "" if not installed; of
        the devices that JAX sees also the kind, as the entry `device`."""
        seen = {"device": self.devices(1)[0].device_kind} if self.kind == "local" else {}
        names = ["jax", "jaxlib", "flax"]
        of_cuda = ["jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13"]
        own = {"tpu": ["libtpu"], "cuda": of_cuda, "rocm": ["jax-rocm7-pjrt"]}
        return {**seen, **{name: version(name) for name in names + own.get(self.kind, [])}}


def default_platform(devices: int, *, on_mesh: bool, slices: int = 1) -> tuple[str, str]:
    """The platform to compile for where none is named, and why. Without a mesh (`on_mesh`) a
    program on one device is for one chip of any slice.

    - `slices`: of how many slices of a TPU, or hosts with GPUs, the devices are.
    """
    why, devices = "as its compiler is installed", devices // slices
    hosts = f"{slices}x" if slices > 1 else ""
    if version("libtpu") and matches(version("libtpu"), required("tpu", "libtpu")):
        if topology := _V5P.get(devices if on_mesh or devices > 1 else min(_V5P)):
            return f"tpu:v5p:{topology}{f'*{slices}' if slices > 1 else ''}", why
        why = f"as no slice of a TPU v5p has {counted(devices, 'device')}"
    if version("jax-cuda13-plugin") == version("jax") and version("nvidia-cuda-nvcc"):
        return f"cuda:h100:{hosts}{devices}", why
    if version("jax-rocm7-pjrt") and version("pyelftools"):
        return f"rocm:mi300x:{hosts}{devices}", why
    if why.startswith("as its"):
        why = "as no compiler of an accelerator is installed"
    return "cpu", f"{why}; its figures mislead, so install one: {install('tpu')}"


def targets() -> list[Platform]:
    """One platform for each kind of accelerator that can be compiled for: a host of it."""
    tpus = [Platform("tpu", name, "2x2" if name in _FLAT else "2x2x1") for name in _TPU_MEMORY]
    gpus = [
        Platform(kind, name, str(_gpus.hosts_of(kind, name)))
        for kind in GPUS
        for name in _gpus.targets(kind)
    ]
    return tpus + gpus
