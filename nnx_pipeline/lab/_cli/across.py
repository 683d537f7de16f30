"""The option `measure --across`: one program with several versions of JAX."""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab._ending import cleared_away
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.versions_table import versions_view
from nnx_pipeline.lab.compile._cache import FOLDER_VARIABLE, Cache
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

PROJECT = "nnx-pipeline"
OLDEST, NEWEST = 11, 14  # Pythons to look for: 3.11 to 3.14
_EXTRAS = {"cpu": "", "tpu": "tpu", "cuda": "cuda", "rocm": "rocm"}  # that bring the compiler
PACKAGE = Path(__file__).parents[2]
_COMMAND = "from nnx_pipeline.lab._cli.main import main; main()"


def run_across(text: str, subject: Subject, target: Target, json_path: str | None) -> None:
    versions = parse_versions(text)
    if subject.config is None:
        raise InputError(
            f"--across compiles a preset, and {subject.name} is a function; leave it out"
        )
    platform = target.platforms()[0]
    folder = Cache.of_user().folder
    if platform.kind == "local":
        raise InputError(
            "--across compiles for cpu, tpu and cuda platforms; found --platform local"
        )
    if folder is None:
        raise InputError(f"--across keeps environments in a folder; set {FOLDER_VARIABLE} to one")
    with progress() as say:
        # All environments first: a version that does not exist is known before minutes of work.
        pythons = [_python(version, platform, folder / "environments", say) for version in versions]
        words = [*subject.words(), *target.words()]
        pairs = zip(versions, pythons, strict=True)
        compiled = [_compiled(version, python, words, say) for version, python in pairs]
    rows = [row for row, _ in compiled]
    errors: dict[str, list[str]] = {}  # the versions by the error that they have in common
    for row in rows:
        if row["error"]:
            errors.setdefault(row["error"], []).append(row["version"])
    failed = "; ".join(f"jax {', '.join(those)}: {error}" for error, those in errors.items())
    if all(code == BAD_INPUT for _, code in compiled):
        raise InputError(failed)
    title = f"one training step of {subject.name} on {target.mesh_config}, {platform}: per device"
    show(versions_view(title, rows), json_path=json_path)
    mesh = target.mesh_config.sizes()
    emit_json(json_path, {"schema": 1, "platform": str(platform), "mesh": mesh, "across": rows})
    if failed:
        raise Failed(failed)


def parse_versions(text: str) -> list[str]:
    package, _, values = text.partition("=")
    versions = [value.strip() for value in values.split(",")]
    if package.strip() != "jax" or not all(map(_is_version, versions)):
        raise InputError(
            f"--across {text!r} is not of the form jax=VERSION,VERSION; write for example "
            f"--across jax={jax.__version__},0.12.0.1"
        )
    if len({Version(one) for one in versions}) < max(len(versions), 2):
        raise InputError(
            f"--across {text} needs two different versions or more, none of them twice"
        )
    (needed,) = (one for one in map(Requirement, requirements("cpu")) if one.name == "jax")
    for version in versions:
        if not needed.specifier.contains(version, prereleases=True):
            raise InputError(
                f"--across jax={version}: this project needs jax{needed.specifier}; choose another "
                "version"
            )
    return versions


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _python(version: str, platform: Platform, folder: Path, say: Progress) -> str:
    if version == jax.__version__ and all(platform.versions().values()):
        say(f"jax {version}: it is installed here")
        return sys.executable
    return python_with(version, platform.kind, folder, say)


def _compiled(
    version: str, python: str, words: Sequence[str], say: Progress
) -> tuple[dict[str, Any], int]:
    """The JSON of `measure` with one version of JAX, or the error; then the exit code."""
    with tempfile.TemporaryDirectory(prefix="nnx-pipeline-") as folder:
        # This package alone: beside it in its folder another JAX may be installed.
        (Path(folder) / PACKAGE.name).symlink_to(PACKAGE, target_is_directory=True)
        _offer_presets(Path(folder))
        # Without -P the current directory, where a user's modules may be, would come first.
        written = Path(folder) / "result.json"
        code, said = execute(
            [python, "-P", "-c", _COMMAND, "measure", *words, "--json", str(written)],
            environment={**os.environ, "PYTHONPATH": folder, "PYTHONNOUSERSITE": "1"},
            say=lambda line: say(f"jax {version}: {line}"),
        )
        if code == 0:
            return {"version": version, "error": None, **json.loads(written.read_text())}, code
    return {"version": version, "error": _reason(code, said)}, code


def _offer_presets(folder: Path) -> None:
    """Makes the entry points of this project known to a Python with `folder` on its path."""
    installed = importlib.metadata.distribution(PROJECT)
    info = folder / f"{PACKAGE.name}-{installed.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(installed.read_text(name) or "", "utf-8")


def _reason(code: int, said: str) -> str:
    """Why a process gave no figures, in one line; a `code` below 0 is the signal that ended it."""
    lines = [line for line in said.splitlines() if line.strip()]
    if code >= 0:
        return (lines or [f"exit status {code}"])[-1].removeprefix("nnx-pipeline: ")
    # A compiler that finds a fault of its own ends the process, and C++ says why in a line that
    # begins with F and the date; then comes its stack.
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    ended = f"the process was ended by a signal ({signal.strsignal(-code)})"
    return ": ".join([ended, *(fatal[:1] or lines[-1:])])


def execute(
    command: Sequence[str],
    *,
    say: Progress = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    lines = []
    with process, cleared_away(process.kill):
        for line in process.stderr or ():
            lines.append(line)
            say(line.rstrip())
    return process.returncode, "".join(lines)


def requirements(kind: str) -> list[str]:
    """What this project needs for a kind of platform, such as `tpu`, by its metadata."""
    found = map(Requirement, importlib.metadata.requires(PROJECT) or [])
    wanted = {"extra": _EXTRAS[kind]}
    needed = [one for one in found if one.marker is None or one.marker.evaluate(wanted)]
    return sorted(str(one).partition(";")[0].strip() for one in needed)


def python_with(version: str, kind: str, folder: Path, say: Progress) -> str:
    """The Python of an environment in `folder` with this version of JAX, built if need be.

    An environment gets its name when it is complete, so that none is found whose making was
    interrupted. It has no copy of this project, whose source may change.
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
    """Removes what processes have left that were killed while they made this one."""
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


def _needs_another_python(said: str, version: str) -> bool:
    ignored = re.search(rf"(?<![\d.]){re.escape(version)} Requires-Python", said)
    return bool(ignored) or "No matching distribution found for jaxlib" in said


def _error(said: str, version: str) -> Exception:
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
