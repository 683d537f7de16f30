"""The packages that bring a compiler: their versions, and what they want of the environment."""

import importlib.metadata

from nnx_pipeline.lab.errors import InputError

# Without the first, libtpu asks a metadata server that is not there; the next two name a host and a
# slice so that it does not warn; the last lets several processes compile at the same time.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class MissingCompiler(InputError):
    """Raised when the compiler of a platform is not installed."""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def required(extra: str, package: str) -> str:
    """The version that the installed JAX pins for one of its extras, such as `==0.0.42.*`."""
    for requirement in importlib.metadata.requires("jax") or []:
        name, _, marker = requirement.partition(";")
        if name.strip().startswith(package) and f'"{extra}"' in marker:
            return name.strip()[len(package) :].strip()
    return ""


def matches(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return not wanted or version in SpecifierSet(wanted)


def missing_packages(kind: str) -> list[str]:
    """The packages that the compiler of a kind of platform needs and that are not installed."""
    needed = {"tpu": ["libtpu"], "cuda": ["jax-cuda13-plugin", "nvidia-cuda-nvcc"]}
    needed["rocm"] = ["jax-rocm7-pjrt", "pyelftools"]
    return [package for package in needed.get(kind, []) if not version(package)]
