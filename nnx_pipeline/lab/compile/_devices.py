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

from nnx_pipeline.lab.compile import _gpus, _rocm
from nnx_pipeline.lab.compile import platform as platforms
from nnx_pipeline.lab.compile.platform import MissingCompiler, Platform
from nnx_pipeline.lab.errors import InputError, install


def devices(platform: Platform, needed: int) -> Sequence[jax.Device]:
    """As `Platform.devices`."""
    if platform.kind == "local":
        return _local_devices()
    if platform.kind == "rocm":
        _find_rocm(platform)
    _use_virtual_cpus(needed)
    if platform.kind == "cpu":
        return jax.devices("cpu")
    if platform.kind == "tpu":
        return _tpu_devices(platform)
    if platform.kind == "cuda":
        _check_cuda(platform)
    hosts, gpus = _gpus.by_host(platform.kind, platform.target, platform.topology)
    text = _gpus.description(platform.kind, platform.target)
    return _topology(platform, target_config=text, topology=f"1x{hosts}x{gpus}")


def _use_virtual_cpus(needed: int) -> None:
    """Makes JAX start with that many virtual CPU devices; InputError if it started with fewer."""
    if needed > platforms.MOST_CPUS:
        raise InputError(
            f"the mesh needs {needed} virtual CPU devices, of which {platforms.MOST_CPUS} are the "
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
        _set(platforms.TPU_ENVIRONMENT)
    with _quiet_plugins(whole=False):
        return jax.devices()


def _set(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def _tpu_devices(platform: Platform) -> Sequence[jax.Device]:
    wanted = platforms.required("tpu", "libtpu")
    have = platforms.version("libtpu")
    cure = install("tpu")
    if not have:
        raise MissingCompiler(f"platform {platform} needs libtpu, which is not installed; {cure}")
    if not platforms.matches(have, wanted):
        raise InputError(
            f"platform {platform} needs libtpu{wanted} for jax {platforms.version('jax')} and "
            f"found {have}, whose programs this JAX cannot read back; {cure}"
        )
    _set(platform.environment)
    # Where programs run both cores of a v4 are one device; by default the compiler has two.
    options: dict[str, Any] = {}
    if platform.target == "v4":
        options["chip_config_name"] = "megacore"
    shape, _, slices = platform.topology.partition("*")
    if slices:
        options["num_slices"] = int(slices)
    return _topology(platform, topology_name=f"{platform.target}:{shape}", **options)


def _check_plugin(platform: Platform, package: str, extra: str) -> None:
    """Raises an error where the plugin of a GPU's maker is missing, or not of JAX's version."""
    wanted, have = platforms.version("jax"), platforms.version(package)
    if not have:
        raise MissingCompiler(
            f"platform {platform} needs {package}, which is not installed; {install(extra)}"
        )
    if have != wanted:
        raise InputError(
            f"platform {platform} needs {package} {wanted}, the version of jax, and found {have}; "
            f"{install(extra)}"
        )


def _check_cuda(platform: Platform) -> None:
    _check_plugin(platform, "jax-cuda13-plugin", "cuda")
    if not platforms.version("nvidia-cuda-nvcc"):
        raise MissingCompiler(f"platform {platform} needs ptxas and libdevice; {install('cuda')}")


def _find_rocm(platform: Platform) -> None:
    _check_plugin(platform, _rocm.PACKAGE, "rocm")
    if not platforms.version("pyelftools"):
        raise MissingCompiler(f"platform {platform} needs pyelftools; {install('rocm')}")
    _rocm.register()


def _topology(platform: Platform, **options: Any) -> Sequence[jax.Device]:
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform=platform.kind, **options).devices
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
