"""Environments with other versions of packages, made by pip and kept in the cache folder."""

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from nnx_pipeline.lab._baseline.execute import execute
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.compile._cache import FOLDER_VARIABLE, Cache
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.errors import InputError, Unavailable

PROJECT = "nnx-pipeline"
OLDEST, NEWEST = 11, 14  # Pythons to look for: 3.11 to 3.14
_EXTRAS = {"cpu": "", "tpu": "tpu", "cuda": "cuda", "rocm": "rocm"}  # that bring the compiler
# Files of one version of JAX and of its compilers, which another version must not find.
_OF_JAX = re.compile(r"(jax|jaxlib|jax_plugins|jax_(cuda|rocm)\w+|libtpu)(-[^-]+\.dist-info)?")


@dataclass(frozen=True)
class Environment:
    """A Python with packages of its own, and behind them those of the Python that runs here.

    - `packages`: those that it has at a version of its own.
    """

    python: str = sys.executable
    packages: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        # What these add would come before its own packages.
        return {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"} if self.packages else {}

    def behind(self, folder: Path) -> dict[str, list[str]]:
        """The folders of packages, and others, that come last on its path; links in `folder`."""
        if not self.packages:
            return {"packages": [], "paths": []}
        library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
        inside = [Path(one) for one in sys.path if one and Path(one).is_dir()]
        sites = [one for one in inside if one.name in ("site-packages", "dist-packages")]
        others = [one for one in inside if one not in sites and not _is_in(one, library)]
        linked = [folder / str(number) / "site-packages" for number in range(len(sites))]
        for site, links in zip(sites, linked, strict=True):
            links.mkdir(parents=True)
            for one in site.iterdir():
                if "jax" not in self.packages or not _OF_JAX.fullmatch(one.name):
                    (links / one.name).symlink_to(one)
        return {"packages": [*map(str, linked)], "paths": [*map(str, others)]}


HERE = Environment()


def _is_in(path: Path, folders: set[str]) -> bool:
    return any(path == Path(one) or path.is_relative_to(one) for one in folders)


@dataclass(frozen=True)
class Wanted:
    """A package at one version; `option` is how the user wrote it."""

    name: str
    version: str
    option: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def parse_wanted(option: str, text: str) -> Wanted:
    """A package at a version, such as `libtpu==0.0.40`; raises InputError for anything else."""
    name, _, version = text.partition("==")
    called = f"{option} {text}"
    try:
        named = canonicalize_name(Requirement(name.strip()).name)
        wanted = Wanted(named, str(Version(version.strip())), called)
    except (InvalidRequirement, InvalidVersion) as error:
        raise InputError(
            f"{called} is no package at a version; write for example {option} jax==0.12.0.1"
        ) from error
    check_version(wanted)
    return wanted


def check_version(wanted: Wanted) -> None:
    """Raises InputError for a version that this project does not run with."""
    for needed in map(Requirement, requirements("cpu")):
        is_it = canonicalize_name(needed.name) == wanted.name
        if is_it and not needed.specifier.contains(wanted.version, prereleases=True):
            raise InputError(
                f"{wanted.option}: this project needs {needed.name}{needed.specifier}; choose "
                "another version"
            )


def requirements(kind: str) -> list[str]:
    """What this project needs for a kind of platform, such as `tpu`, by its metadata."""
    found = map(Requirement, importlib.metadata.requires(PROJECT) or [])
    wanted = {"extra": _EXTRAS[kind]}
    needed = [one for one in found if one.marker is None or one.marker.evaluate(wanted)]
    return sorted(str(one).partition(";")[0].strip() for one in needed)


def folder_of_user(option: str) -> Path:
    """Where environments are kept; raises InputError where there is no cache folder."""
    folder = Cache.of_user().folder
    if folder is None:
        raise InputError(
            f"{option} keeps environments in the cache folder, and there is none; name one by "
            f"{FOLDER_VARIABLE}"
        )
    return folder / "environments"


def environment_of(option: str, packages: Sequence[str], kind: str, say: Progress) -> Environment:
    """The environment with packages, `PACKAGE==VERSION` each; the present one without any."""
    if not packages:
        return HERE
    wanted = [parse_wanted(option, text) for text in packages]
    return environment_with(wanted, kind, folder_of_user(option), say)


def environment_with(
    wanted: Sequence[Wanted], kind: str, folder: Path, say: Progress
) -> Environment:
    """An environment with these packages, built if need be.

    With another JAX it has all that this project needs for a kind of platform. Any other package
    is installed alone, and all else is found behind it. An environment gets its name when it is
    complete, so that none is found whose making was interrupted. It has no copy of this project,
    whose source may change. Raises InputError for what there is not, and Unavailable with the
    words of pip.
    """
    of_jax = [str(one) for one in wanted if one.name == "jax"]
    needed = [*of_jax, *requirements(kind)] if of_jax else []
    alone = [str(one) for one in wanted if one.name != "jax"]
    digest = hashlib.sha256("\n".join([*needed, "", *alone]).encode()).hexdigest()[:10]
    named = "-".join(f"{one.name}-{one.version}" for one in wanted)
    home = folder / f"{named}-{kind}-{digest}"
    found = Environment(str(home / "bin" / "python"), tuple(one.name for one in wanted))
    if Path(found.python).exists():
        return found
    _remove_abandoned(home)
    what = ", ".join(str(one).replace("==", " ") for one in wanted)
    say(f"{what} gets an environment of its own in {home}")
    tried = []
    # Without a JAX of its own it shares compiled packages with the Python that runs.
    for candidate in _pythons() if of_jax else [sys.executable]:
        tried.append(candidate)
        building = home.with_name(f"{home.name}.building-{os.getpid()}")
        remove = functools.partial(shutil.rmtree, building, ignore_errors=True)
        with cleared_away(remove):
            try:
                said = _installed(candidate, building, [needed, alone], say)
                if said is None:
                    if not Path(found.python).exists():  # else another process was faster
                        # What is left of an environment whose Python was removed since.
                        shutil.rmtree(home, ignore_errors=True)
                        building.rename(home)
                    return found
            finally:
                remove()
        if not of_jax or not _needs_another_python(said, wanted):
            raise _error(said, wanted)
        say(f"{what} does not support that Python")
    raise InputError(
        f"{wanted[0].option}: it supports none of the Pythons here ({', '.join(tried)}); "
        "install another one, for example by pyenv"
    )


def _remove_abandoned(home: Path) -> None:
    """Removes what processes have left that were killed while they made this one."""
    for folder in home.parent.glob(f"{home.name}.building-*"):
        try:
            os.kill(int(folder.name.rpartition("-")[2]), 0)  # asks whether the process is there
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass  # it is there, and another user's


def _installed(
    python: str, folder: Path, groups: Sequence[Sequence[str]], say: Progress
) -> str | None:
    """Makes an environment of packages with what they need, and of packages alone; returns None,
    or what went wrong in the words of venv or pip."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = str(folder / "bin" / "python")
    pip = (own, "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check")
    whole, alone = groups
    commands = [("building", [python, "-m", "venv", str(folder)])]
    commands += [("installing into", [*pip, *whole])] if whole else []
    commands += [("installing into", [*pip, "--no-deps", *alone])] if alone else []
    for doing, command in commands:
        say(f"{doing} an environment with {[*whole, *alone][0]} on {python}")
        code, said = execute(command)
        if code:
            return said or f"{' '.join(command[:3])} ended with {code}"
    return None


def _pythons() -> Iterator[str]:
    """The Python that runs, then one of each other version that is found here."""
    yield sys.executable
    for minor in range(OLDEST, NEWEST + 1):
        if minor == sys.version_info.minor:
            continue
        versions = Path.home() / ".pyenv" / "versions"
        kept = sorted(versions.glob(f"3.{minor}.*/bin/python"))
        on_path = shutil.which(f"python3.{minor}")
        for found in filter(None, (on_path, *map(str, kept))):
            # What pyenv puts on the path starts only the versions that are switched on.
            check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
            if execute([found, "-c", check])[0] == 0:
                yield found
                break


def _needs_another_python(said: str, wanted: Sequence[Wanted]) -> bool:
    versions = "|".join(re.escape(one.version) for one in wanted)
    ignored = re.search(rf"(?<![\d.])({versions}) Requires-Python", said)
    return bool(ignored) or "No matching distribution found for jaxlib" in said


def _error(said: str, wanted: Sequence[Wanted]) -> Exception:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = [*lines, *errors][-1].removeprefix("ERROR: ")
    for one in wanted:
        if known := re.search(rf"{re.escape(str(one))} \(from versions: (.*[\d.]+)\)", said):
            newest = ", ".join(known[1].split(", ")[-3:])
            return InputError(f"{one.option}: {last}; choose one that there is, such as {newest}")
    what = ", ".join(str(one).replace("==", " ") for one in wanted)
    return Unavailable(f"no environment with {what}: {last}")
