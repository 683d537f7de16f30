"""The option `measure --across`: one program with several versions of JAX."""

from __future__ import annotations

import functools

import jax
from packaging.version import InvalidVersion, Version

from nnx_pipeline.lab._baseline.environment import (
    HERE,
    Environment,
    Wanted,
    check_version,
    environment_with,
    folder_of_user,
)
from nnx_pipeline.lab._baseline.process import run_with
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Target
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.versions_table import versions_view
from nnx_pipeline.lab.compile.measure import Progress
from nnx_pipeline.lab.errors import InputError


def run_across(text: str, subject: Subject, target: Target, json_path: str | None) -> None:
    wanted = parse_versions(text)
    platform = target.platforms()[0]
    if platform.kind == "local":
        raise InputError(
            "--across compiles for cpu, tpu, cuda and rocm platforms; found --platform local"
        )
    folder = folder_of_user("--across")

    def environment(one: Wanted) -> Environment:
        if one.version == jax.__version__ and all(platform.versions().values()):
            say(f"jax {one.version}: it is installed here")
            return HERE
        return environment_with([one], platform.kind, folder, say)

    with progress() as say:
        # All environments first: a version that does not exist is known before minutes of work.
        environments = [environment(one) for one in wanted]
        words = ["measure", *subject.words(), *target.words()]
        told = [functools.partial(_told, say, one.version) for one in wanted]
        ended = [
            run_with(words, environment=one, say=tell)
            for one, tell in zip(environments, told, strict=True)
        ]
    rows = [
        {"version": one.version, "error": done.reason or None, **(done.result or {})}
        for one, done in zip(wanted, ended, strict=True)
    ]
    errors: dict[str, list[str]] = {}  # the versions by the error that they have in common
    for row in rows:
        if row["error"]:
            errors.setdefault(row["error"], []).append(row["version"])
    failed = "; ".join(f"jax {', '.join(those)}: {error}" for error, those in errors.items())
    if all(done.code == BAD_INPUT for done in ended):
        raise InputError(failed)
    title = f"{subject.title()}, {platform}: per device"
    show(versions_view(title, rows), json_path=json_path)
    mesh = subject.mesh.sizes()
    emit_json(json_path, {"schema": 1, "platform": str(platform), "mesh": mesh, "across": rows})
    if failed:
        raise Failed(failed)


def _told(say: Progress, version: str, line: str) -> None:
    say(f"jax {version}: {line}")


def parse_versions(text: str) -> list[Wanted]:
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
    wanted = [Wanted("jax", version, f"--across jax={version}") for version in versions]
    for one in wanted:
        check_version(one)
    return wanted


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False
