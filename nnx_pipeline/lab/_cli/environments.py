"""Python environments with other versions of JAX, built once and kept in the cache folder."""

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from nnx_pipeline.lab._cli.support import Failed
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.errors import InputError

PROJECT = "nnx-pipeline"
OLDEST, NEWEST = 11, 14  # Pythons to look for: 3.11 to 3.14
_EXTRAS = {
    "cpu": "",
    "tpu": "tpu",
    "cuda": "cuda",
    "rocm": "rocm",
}  # that bring the compiler of a kind of platform


def execute(
    command: Sequence[str], *, say: Progress, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Runs a process to its end, and ends it if this process is interrupted.

    - `command`: the program and its arguments. What it prints to standard output is dropped.
    - `say`: called with each line that it prints to standard error.
    - `environment`: its environment variables; None for those of this process.

    Returns its exit status and all that it printed to standard error.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
    )
    lines = []
    with process, cleared_away(process.kill):
        for line in process.stderr or ():
            lines.append(line)
            say(line.rstrip())
    return process.returncode, "".join(lines)


def requirements(kind: str) -> list[str]:
    """What this project needs for one kind of platform, as its own package says.

    - `kind`: of the platform: `cpu`, `tpu` or `cuda`.
    """
    found = map(Requirement, importlib.metadata.requires(PROJECT) or [])
    wanted = {"extra": _EXTRAS[kind]}
    needed = [one for one in found if one.marker is None or one.marker.evaluate(wanted)]
    return sorted(str(one).partition(";")[0].strip() for one in needed)


def check_version(version: str) -> None:
    """Raises InputError for a version of JAX that this project does not work with."""
    for one in map(Requirement, requirements("cpu")):
        if one.name == "jax" and not one.specifier.contains(version, prereleases=True):
            raise InputError(
                f"--across jax={version}: this project needs jax{one.specifier}; choose another "
                "version"
            )


def python_with(version: str, kind: str, folder: Path, say: Progress) -> str:
    """The Python of an environment with one version of JAX; builds the environment if need be.

    - `version`: of JAX.
    - `kind`: of the platform whose compiler it has: `cpu`, `tpu` or `cuda`.
    - `folder`: where environments are kept.
    - `say`: called with a text when a phase begins.

    An environment gets its name when it is complete, so that one whose making was interrupted is
    not found. It holds what this project needs, and not the project, whose source may change.

    Raises InputError for a version that does not exist or that no Python here supports, and Failed
    with the last line of pip for any other reason.
    """
    needed = [f"jax=={version}", *requirements(kind)]
    digest = hashlib.sha256("\n".join(needed).encode()).hexdigest()[:10]
    home = folder / f"jax-{version}-{kind}-{digest}"
    python = home / "bin" / "python"
    if python.exists():
        return str(python)
    _remove_abandoned(home)
    say(f"jax {version} gets an environment of its own in {home}")
    tried = []
    for candidate in _pythons():
        tried.append(candidate)
        building = home.with_name(f"{home.name}.building-{os.getpid()}")
        remove = functools.partial(shutil.rmtree, building, ignore_errors=True)
        with cleared_away(remove):
            try:
                said = _installed(candidate, building, needed, say)
                if said is None:
                    if not python.exists():  # else another process was faster
                        # What is left of an environment whose Python was removed since.
                        shutil.rmtree(home, ignore_errors=True)
                        building.rename(home)
                    return str(python)
            finally:
                remove()
        if not _needs_another_python(said, version):
            raise _error(said, version)
        say(f"jax {version} does not support that Python")
    raise InputError(
        f"--across jax={version}: it supports none of the Pythons here ({', '.join(tried)}); "
        "install another one, for example by pyenv"
    )


def _remove_abandoned(home: Path) -> None:
    """Removes what processes have left that were killed while they made this environment."""
    for folder in home.parent.glob(f"{home.name}.building-*"):
        try:
            os.kill(int(folder.name.rpartition("-")[2]), 0)  # asks whether the process is there
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass  # it is there, and another user's


def _installed(python: str, folder: Path, needed: Sequence[str], say: Progress) -> str | None:
    """Makes an environment; returns None, or what went wrong in the words of venv or pip."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = str(folder / "bin" / "python")
    quiet = ("-q", "--no-input", "--disable-pip-version-check")
    making = [python, "-m", "venv", str(folder)]
    installing = [own, "-m", "pip", "install", *quiet, *needed]
    for doing, command in (("building", making), ("installing into", installing)):
        say(f"{doing} an environment with {needed[0]} on {python}")
        code, said = execute(command, say=lambda line: None)
        if code:
            return said or f"{' '.join(command[:3])} ended with {code}"
    return None


def _pythons() -> Iterator[str]:
    """The Python that runs, then one of each other version that is found here."""
    yield sys.executable
    for minor in range(OLDEST, NEWEST + 1):
        if minor == sys.version_info.minor:
            continue
        versions = Path(os.path.expanduser("~")) / ".pyenv" / "versions"
        kept = sorted(versions.glob(f"3.{minor}.*/bin/python"))
        on_path = shutil.which(f"python3.{minor}")
        for found in filter(None, (on_path, *map(str, kept))):
            # What pyenv puts on the path starts only the versions that are switched on.
            check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
            if execute([found, "-c", check], say=lambda line: None)[0] == 0:
                yield found
                break


def _needs_another_python(said: str, version: str) -> bool:
    """Whether pip refuses only because of the Python that it runs on."""
    ignored = re.search(rf"(?<![\d.]){re.escape(version)} Requires-Python", said)
    return bool(ignored) or "No matching distribution found for jaxlib" in said


def _error(said: str, version: str) -> Exception:
    """The error for what pip said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = [*lines, *errors][-1].removeprefix("ERROR: ")
    known = re.search(rf"jax=={re.escape(version)} \(from versions: (.*[\d.]+)\)", said)
    if known:
        newest = ", ".join(known[1].split(", ")[-3:])
        return InputError(
            f"--across jax={version}: {last}; choose one that there is, such as {newest}"
        )
    return Failed(f"no environment with jax {version}: {last}")
