"""What runs in the other process: the command, with the modules of the other files."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LAB = __name__.rpartition("._baseline")[0]
PACKAGE = LAB.rpartition(".")[0] or LAB


class MovedImports:
    """Finds a module whose file lies below one folder at the same place below another.

    So an installed package is found as it was, however it was installed in place: by a `.pth`
    file, a finder of its own, or `PYTHONPATH`. What is not there is not found, and is never
    taken from the present files.
    """

    def __init__(self, root: Path, files: Path) -> None:
        self.root, self.files = root.resolve(), files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None:
                return self._moved(found)
        return None

    def _moved(self, found: ModuleSpec) -> ModuleSpec:
        places = [Path(place) for place in found.submodule_search_locations or ()]
        file = Path(found.origin) if found.has_location and found.origin else None
        if not any(map(self._is_moved, filter(None, [file, *places]))):
            return found
        there = [place for place in map(self._there, places) if place.is_dir()]
        if file is not None and self._there(file).is_file():
            moved = importlib.util.spec_from_file_location(
                found.name,
                self._there(file),
                submodule_search_locations=[*map(str, there)] if places else None,
            )
        elif file is None and there:
            moved = ModuleSpec(found.name, None, is_package=True)
            moved.submodule_search_locations = [*map(str, there)]
        else:
            moved = None
        if moved is None:
            raise ModuleNotFoundError(
                f"No module named {found.name!r} in that revision", name=found.name
            )
        return moved

    def _is_moved(self, place: Path) -> bool:
        resolved = place.resolve()
        # An environment may lie in the folder of the repository.
        inside = resolved.is_relative_to(self.root) and "site-packages" not in resolved.parts
        return inside and not resolved.is_relative_to(self.files)

    def _there(self, place: Path) -> Path:
        if not self._is_moved(place):
            return place
        return self.files / place.resolve().relative_to(self.root)


def run_command(root: str | None, files: str | None) -> None:
    """Runs the command line, with the modules below `root` taken from `files`."""
    # The lab that measures is that of here in any case: it is imported before.
    run = importlib.import_module(f"{LAB}._cli.main").main
    if root is not None and files is not None:
        move_imports(Path(root), Path(files))
    run()


def run_tests(root: str, files: str) -> None:
    """Runs those tests of `files` that compile programs, with their modules from there."""
    pytest = importlib.import_module("pytest")
    importlib.import_module(f"{LAB}.pytest_plugin")
    move_imports(Path(root), Path(files))
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(sys.argv[1:], plugins=[_Compiling()])
    sys.exit(int(code))


class _Compiling:
    """Leaves out all tests without the fixture `compile_memory`."""

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        others = [one for one in items if "compile_memory" not in one.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [one for one in items if one not in others]


def move_imports(root: Path, files: Path) -> None:
    """Takes modules below `root` from `files` from now on, all but those of the lab."""
    sys.meta_path.insert(0, MovedImports(root, files))
    lab = sys.modules[LAB]
    if not Path(str(lab.__file__)).resolve().is_relative_to(root.resolve()):
        return
    for name in [*sys.modules]:
        if f"{name}.".startswith(f"{PACKAGE}.") and not f"{name}.".startswith(f"{LAB}."):
            del sys.modules[name]
    if PACKAGE != LAB:
        vars(importlib.import_module(PACKAGE))[LAB.rpartition(".")[2]] = lab
