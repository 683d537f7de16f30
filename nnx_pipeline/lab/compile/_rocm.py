"""AMD's compiler without ROCm and without a GPU.

The plugin of JAX names libraries of ROCm (`libamdhip64`, `libMIOpen`, …) and takes functions of
them, none of which it needs to compile. Where ROCm is not installed, an empty library stands in for
each: it has the same name, and its functions return an error.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnx_pipeline.lab.compile._cache import Cache
from nnx_pipeline.lab.errors import InputError

PACKAGE = "jax-rocm7-pjrt"
_PLUGIN = "jax_plugins/xla_rocm7/xla_rocm_plugin.so"
_REGISTERED = "PJRT_NAMES_AND_LIBRARY_PATHS"  # of JAX: plugins that no Python package registers
_NO_DEVICE = 100  # hipErrorNoDevice; every other library takes it for an error too
IS_TEXT = re.compile("(?i)get_?(error|status)_?string$")  # returns a pointer to a text
# Libraries of these versions are those of glibc and gcc, which every machine has.
_OF_THE_SYSTEM = re.compile("GLIBC|CXXABI|GCC")
# By version, "" for none: the functions that the plugin takes of a library.
Functions = dict[str, list[str]]


@functools.cache
def register() -> None:
    """Lets JAX find AMD's compiler when it looks for its plugins; to be called before that.

    Nothing is done on a machine with an AMD GPU, where the plugin registers itself. Raises
    InputError where a stand-in is needed and there is no C compiler, and where a library of ROCm
    lacks what the plugin takes.
    """
    # Beside NVIDIA's plugin, which has a class of the same name; either works.
    warnings.filterwarnings("ignore", "nanobind: type .* was already registered", RuntimeWarning)
    if Path("/dev/kfd").exists():
        return
    load_libraries(plugin())
    named = [os.environ.get(_REGISTERED, ""), f"rocm:{plugin()}"]
    os.environ[_REGISTERED] = ",".join(filter(None, named))


def plugin() -> Path:
    return Path(str(importlib.metadata.distribution(PACKAGE).locate_file(_PLUGIN)))


def load_libraries(plugin: Path) -> list[str]:
    """Loads the libraries of ROCm that a plugin names, and gives the path of each.

    - `plugin`: a shared library.

    A library that the loader finds comes first, then one below `$ROCM_PATH` or `/opt/rocm`, then a
    stand-in from the cache folder, which is made if it is not there.
    """
    wanted, anywhere = functions_of(plugin)
    rocm = Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / "lib"
    loaded = {name: _first_that_loads(name, str(rocm / name)) for name in wanted}
    for name, path in loaded.items():
        if path:
            _check_functions(path, wanted[name])
    missing = {name: wanted[name] for name, path in loaded.items() if path is None}
    if missing:
        missing[next(iter(missing))][""] = anywhere
    made = stand_ins(missing)
    for name in missing:
        loaded[name] = _first_that_loads(str(made / name))
        if loaded[name] is None:
            raise InputError(f"{made / name} does not load; delete {made}, and run it again")
    return [str(path) for path in loaded.values()]


def _first_that_loads(*paths: str) -> str | None:
    for path in paths:
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return path
    return None


def _check_functions(path: str, functions: Functions) -> None:
    """The loader of the plugin would end the process where a function is missing."""
    library = ctypes.CDLL(path)
    wanted = [name for of_version in functions.values() for name in of_version]
    lacks = [name for name in wanted if not hasattr(library, name)]
    if lacks:
        others = f" and {len(lacks) - 1} more" if lacks[1:] else ""
        raise InputError(
            f"{path} is there, but has no {lacks[0]}{others}, which {PACKAGE} "
            f"{importlib.metadata.version(PACKAGE)} takes; install ROCm in the version of the "
            "plugin, or take it out of $ROCM_PATH, $LD_LIBRARY_PATH and /opt/rocm"
        )


def functions_of(plugin: Path) -> tuple[dict[str, Functions], list[str]]:
    """The functions that a plugin takes of each library of ROCm, and those of any one of them.

    - `plugin`: a shared library in the ELF format.

    A function without a version may come from any library. Libraries whose versions are those of
    glibc and gcc are left out.
    """
    from elftools.elf.elffile import ELFFile

    with plugin.open("rb") as file:
        section: Callable[[str], Any] = ELFFile(file).get_section_by_name
        versions = {
            version["vna_other"]: (library.name, version.name)
            for library, needed in section(".gnu.version_r").iter_versions()
            for version in needed
        }
        system = {name for name, version in versions.values() if _OF_THE_SYSTEM.match(version)}
        needed = [tag.needed for tag in section(".dynamic").iter_tags("DT_NEEDED")]
        wanted: dict[str, Functions] = {name: {} for name in needed if name not in system}
        anywhere, numbers = [], section(".gnu.version")
        for place, symbol in enumerate(section(".dynsym").iter_symbols()):
            kind = (symbol["st_shndx"], symbol["st_info"]["type"], symbol["st_info"]["bind"])
            if kind == ("SHN_UNDEF", "STT_FUNC", "STB_GLOBAL"):
                library, version = versions.get(numbers.get_symbol(place)["ndx"], ("", ""))
                if not library:
                    anywhere.append(symbol.name)
                elif library in wanted:
                    wanted[library].setdefault(version, []).append(symbol.name)
    return wanted, anywhere


def stand_ins(libraries: dict[str, Functions]) -> Path:
    """A folder with an empty library for each name, each of whose functions returns an error.

    - `libraries`: their functions by version, "" for those without.

    They are made once, in the cache folder of the user. Raises InputError where that fails.
    """
    named = hashlib.sha256(repr((importlib.metadata.version(PACKAGE), libraries)).encode())
    folder = (Cache.of_user().folder or Path(tempfile.mkdtemp())) / f"rocm-{named.hexdigest()[:16]}"
    if not all((folder / library).is_file() for library in libraries):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # as without a cache folder
            folder = Path(tempfile.mkdtemp())
        with tempfile.TemporaryDirectory(dir=folder) as made:
            for library, functions in libraries.items():
                _compile(Path(made), library, functions)
                os.replace(Path(made) / library, folder / library)
    return folder


def _compile(folder: Path, library: str, functions: Functions) -> None:
    source, versions = folder / "source.c", folder / "versions"
    names = [name for of_version in functions.values() for name in of_version]
    lines = (
        f'const char *{name}(void) {{ return "there is no AMD GPU"; }}'
        if IS_TEXT.search(name)
        else f"int {name}(void) {{ return {_NO_DEVICE}; }}"
        for name in names
    )
    source.write_text("\n".join([*lines, ""]))
    listed = [
        f"{version} {{ global: {'; '.join(of_version)}; }};"
        for version, of_version in functions.items()
        if version
    ]
    versions.write_text("\n".join([*listed, ""]))
    options = [
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-w",
        f"-Wl,-soname,{library}",
        "-o",
        str(folder / library),
    ]
    options += [f"-Wl,--version-script={versions}"] if listed else []
    said = "found none"
    for compiler in _compilers():
        try:
            done = subprocess.run(
                [*compiler, *options, str(source)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            said = f"{compiler[0]} does not start ({error.strerror})"
            continue
        if done.returncode == 0 and (folder / library).is_file():
            return
        said = f"{compiler[0]} failed ({(done.stderr.strip().splitlines() or [''])[0][:160]})"
    raise InputError(
        "AMD's compiler needs libraries of ROCm, or a C compiler to make empty ones in their "
        f"place, and {said}; pip install ziglang, which brings one"
    )


def _compilers() -> list[list[str]]:
    there = [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    zig = [sys.executable, "-m", "ziglang", "cc"]
    return [*there, *([zig] if importlib.util.find_spec("ziglang") else [])]
