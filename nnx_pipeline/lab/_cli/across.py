"""The option `measure --across`: one program with several versions of JAX."""

import importlib.metadata
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from packaging.version import InvalidVersion, Version

from nnx_pipeline.lab._cli import environments
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.versions_table import versions_view
from nnx_pipeline.lab.compile._cache import FOLDER_VARIABLE, Cache
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

PACKAGE = Path(__file__).parents[2]
_COMMAND = "from nnx_pipeline.lab._cli.main import main; main()"


def run_across(text: str, subject: Subject, target: Target, json_path: str | None) -> None:
    """Compiles one training step with each version of JAX in `jax=0.10.2,0.12.0.1`."""
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
        found = [
            _compiled(version, python, words, say)
            for version, python in zip(versions, pythons, strict=True)
        ]
    rows = [row for row, _ in found]
    errors: dict[str, list[str]] = {}  # the versions by the error that they have in common
    for row in rows:
        if row["error"]:
            errors.setdefault(row["error"], []).append(row["version"])
    failed = "; ".join(f"jax {', '.join(those)}: {error}" for error, those in errors.items())
    if all(code == BAD_INPUT for _, code in found):
        raise InputError(failed)
    title = f"one training step of {subject.name} on {target.mesh_config}, {platform}: per device"
    show(versions_view(title, rows), json_path=json_path)
    mesh = target.mesh_config.sizes()
    told = {"schema": 1, "platform": str(platform), "mesh": mesh, "across": rows}
    emit_json(json_path, told)
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
    for version in versions:
        environments.check_version(version)
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
    return environments.python_with(version, platform.kind, folder, say)


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
        code, said = environments.execute(
            [python, "-P", "-c", _COMMAND, "measure", *words, "--json", str(written)],
            environment={**os.environ, "PYTHONPATH": folder, "PYTHONNOUSERSITE": "1"},
            say=lambda line: say(f"jax {version}: {line}"),
        )
        if code == 0:
            return {"version": version, "error": None, **json.loads(written.read_text())}, code
    return {"version": version, "error": _reason(code, said)}, code


def _offer_presets(folder: Path) -> None:
    """Makes the entry points of this project known to a Python with `folder` on its path."""
    installed = importlib.metadata.distribution(environments.PROJECT)
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
