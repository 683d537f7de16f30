"""The devices of a platform, as JAX has them: real ones, virtual CPUs, or those of a topology.

How a compiler works without devices (JAX 0.10 to 0.12): a topology of `libtpu`, or of the plugin
for CUDA or ROCm, gives device objects from which a mesh can be built. Programs for it can be
lowered and compiled, not run.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from nnx_pipeline.lab.compile import _gpus
from nnx_pipeline.lab.compile._packages import (
    TPU_ENVIRONMENT,
    MissingCompiler,
    matches,
    required,
    version,
)
from nnx_pipeline.lab.errors import InputError, install

MOST_CPUS = 4_096  # virtual ones, which JAX makes one after the other


def devices(kind: str, target: str, topology: str, needed: int) -> Sequence[jax.Device]:
    """As `Platform.devices`, for a platform with this kind, target and topology."""
    if kind == "local":
        return _local_devices()
    platform = ":".join((kind, target, topology))
    if kind == "rocm":
        _find_rocm(platform)
    _use_virtual_cpus(needed)
    if kind == "cpu":
        return jax.devices("cpu")
    if kind == "tpu":
        return _tpu_devices(platform, target, topology)
    if kind == "cuda":
        _check_cuda(platform)
    hosts, gpus = _gpus.by_host(kind, target, topology)
    text = _gpus.description(kind, target)
    return _topology(platform, target_config=text, topology=f"1x{hosts}x{gpus}")


def _use_virtual_cpus(needed: int) -> None:
    """Makes JAX start with that many virtual CPU devices; InputError if it started with fewer."""
    if needed > MOST_CPUS:
        raise InputError(
            f"the mesh needs {needed} virtual CPU devices, of which {MOST_CPUS} are the "
            "most; choose smaller axes"
        )
    try:
        jax.config.update("jax_platforms", "cpu")
        if needed > 1:
            jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        pass  # JAX has started already: its number of devices is fixed, and is checked below.
    with _quiet_plugins(whole=True):
        have = len(jax.devices("cpu"))
    if have < needed:
        raise InputError(
            f"the mesh needs {needed} virtual CPU devices and this process started with {have}; "
            f"set jax_num_cpu_devices={needed} before JAX runs anything, or JAX_NUM_CPU_DEVICES="
            f"{needed} in the environment"
        )


@contextlib.contextmanager
def _quiet_plugins(*, whole: bool) -> Iterator[None]:
    """A context for JAX to start in. A plugin that finds no device of its kind is logged by JAX
    with a traceback, which is left out; and with `whole` all of it, where no device is wanted."""

    def shorten(record: logging.LogRecord) -> bool:
        record.exc_info = None
        return not whole

    log = logging.getLogger("jax._src.xla_bridge")  # the name is JAX's own, and may change
    log.addFilter(shorten)
    try:
        yield
    finally:
        log.removeFilter(shorten)


def _local_devices() -> Sequence[jax.Device]:
    """The devices that JAX sees. Without a TPU libtpu asks for a machine that is not there."""
    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").exists():
        _set(TPU_ENVIRONMENT)
    with _quiet_plugins(whole=False):
        return jax.devices()


def _set(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def _tpu_devices(platform: str, target: str, topology: str) -> Sequence[jax.Device]:
    why = ", whose programs this JAX cannot read back"
    _check_plugin(platform, "libtpu", "tpu", required("tpu", "libtpu"), why)
    _set(TPU_ENVIRONMENT)
    # Where programs run both cores of a v4 are one device; by default the compiler has two.
    options: dict[str, Any] = {}
    if target == "v4":
        options["chip_config_name"] = "megacore"
    shape, _, slices = topology.partition("*")
    if slices:
        options["num_slices"] = int(slices)
    return _topology(platform, topology_name=f"{target}:{shape}", **options)


def _check_plugin(platform: str, package: str, extra: str, wanted: str, why: str = "") -> None:
    """Raises an error where a compiler is missing, or is not `wanted`."""
    have = version(package)
    if not have:
        raise MissingCompiler(
            f"platform {platform} needs {package}, which is not installed; {install(extra)}"
        )
    if not matches(have, wanted):
        raise InputError(
            f"platform {platform} needs {package}{wanted} for jax {version('jax')} and found "
            f"{have}{why}; {install(extra)}"
        )


def _check_cuda(platform: str) -> None:
    _check_plugin(platform, "jax-cuda13-plugin", "cuda", f"=={version('jax')}")
    if not version("nvidia-cuda-nvcc"):
        raise MissingCompiler(f"platform {platform} needs ptxas and libdevice; {install('cuda')}")


def _find_rocm(platform: str) -> None:
    from nnx_pipeline.lab.compile import _rocm

    wanted = required("rocm7-local", "jax-rocm7-plugin")  # whose version is that of the compiler
    _check_plugin(platform, _rocm.PACKAGE, "rocm", wanted)
    if not version("pyelftools"):
        raise MissingCompiler(f"platform {platform} needs pyelftools; {install('rocm')}")
    _rocm.register()


def _topology(platform: str, **options: Any) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=platform.partition(":")[0], **options).devices
    except NotImplementedError as error:
        raise InputError(
            f"platform {platform}: its compiler is not available, because JAX started earlier and "
            "found no such device; measure before jax.devices() and other uses of JAX, or set "
            "JAX_PLATFORMS=cpu"
        ) from error
    except Exception as error:  # of many kinds; the first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"platform {platform}: the compiler does not offer this topology ({reason[:160]}); "
            "try one such as tpu:v5p:2x2x2 or cuda:h100:8; for one chip of a TPU give a whole "
            "host, such as tpu:v5p:2x2x1, and no mesh"
        ) from error
