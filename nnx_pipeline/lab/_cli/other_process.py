"""Programs that other processes compile: `measure --across`, `compare --baseline` and `--with`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import jax
from packaging.version import InvalidVersion, Version

from nnx_pipeline.lab._baseline.arm import Arm, at_revision
from nnx_pipeline.lab._baseline.environment import (
    HERE,
    Environment,
    Wanted,
    check_version,
    environment_of,
    environment_with,
    folder_of_user,
)
from nnx_pipeline.lab._baseline.execute import end_all
from nnx_pipeline.lab._baseline.process import run_with
from nnx_pipeline.lab._baseline.repository import Repository
from nnx_pipeline.lab._baseline.saved import saved_measurements
from nnx_pipeline.lab._cli.outputs import ComparisonOutputs
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Baseline, Target
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab._report.versions_table import versions_view
from nnx_pipeline.lab.comparison.outcome import Outcome, Question, compare_measurements
from nnx_pipeline.lab.compile._packages import version
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

NOW = "now"


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


def run_baseline(
    subject: Subject, given: Baseline, target: Target, outputs: ComparisonOutputs
) -> None:
    """Compares a program with what it was at a revision, or would be with other packages."""
    platforms = target.for_other_process()
    words = [*subject.words(), *target.words()]
    with progress() as say, _first_arm(words, given, platforms, say) as before:
        is_package = given.baseline is None
        now = Arm(label=given.present() if is_package else NOW, words=tuple(words))
        measured = _both(before, now, say)
    outcomes = _outcomes(subject.name, (before, now), measured, len(platforms))
    title = f"{subject.title()}, {target.platform}: per device"
    outputs.report(title, outcomes, target.platform, changed=before.changes.lines())
    if failed := [outcome.note for (outcome,) in outcomes if outcome.failed]:
        raise Failed("; ".join(dict.fromkeys(failed)))
    outputs.fail_if_worse(outcomes)


def _both(before: Arm, now: Arm, say: Progress) -> list[list[Measurement] | str]:
    """Each is compiled in a process of its own, so two threads are enough to do both at once. What
    one cannot be asked ends the other too."""
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(arm.measured, say) for arm in (before, now)]
        done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        wrong = [each for each in waiting if each in done and each.exception()]
        if wrong:
            end_all()
        return [each.result() for each in (*wrong, *waiting)]


def _outcomes(
    name: str, arms: tuple[Arm, Arm], measured: Sequence[list[Measurement] | str], programs: int
) -> list[list[Outcome]]:
    labels = (arms[0].label, arms[1].label)
    question = Question(
        name="compare",
        claim="",
        difference=f"{name}: {labels[0]} and {labels[1]}",
        labels=labels,
        judged_by="account",
    )
    rows = [[one] * programs if isinstance(one, str) else one for one in measured]
    outcomes = [compare_measurements(question, a, b) for a, b in zip(*rows, strict=True)]
    notes = [*arms[0].notes, *_other_inputs(outcomes[0])]
    return [
        [dataclasses.replace(one, note="; ".join(filter(None, [*notes, one.note])))]
        for one in outcomes
    ]


def _other_inputs(outcome: Outcome) -> list[str]:
    one, other = outcome.a, outcome.b
    if not one or not other or one.config.get("arguments") == other.config.get("arguments"):
        return []
    return ["warning: the arguments differ in shape, dtype or sharding"]


@contextlib.contextmanager
def _first_arm(
    words: Sequence[str], given: Baseline, platforms: Sequence[Platform], say: Progress
) -> Iterator[Arm]:
    """What is compared with."""
    if given.is_file:
        yield _saved_arm(given, platforms)
        return
    packages = ", ".join(given.packages)
    environment = environment_of("--with", given.packages, platforms[0].kind, say)
    if given.baseline is None:
        yield Arm(label=packages, environment=environment, words=tuple(words))
        return
    repository = Repository.here()
    commit = repository.commit(given.baseline)
    label = ", ".join(filter(None, [f"{given.baseline} ({commit.short})", packages]))
    with at_revision(repository, commit, label, words, environment) as arm:
        yield arm


def _saved_arm(given: Baseline, platforms: Sequence[Platform]) -> Arm:
    path = str(given.baseline)
    saved = saved_measurements(path)
    kinds = [(one.platform, one.gemm) for one in saved]
    wanted = [(str(one), one.gemm if one.is_gpu else None) for one in platforms]
    if kinds != wanted:
        found, needed = (
            ", ".join(" ".join(filter(None, one)) for one in those) for those in (kinds, wanted)
        )
        raise InputError(
            f"--baseline {path} was compiled for {found}, and this is compiled for {needed}; "
            "choose the same --platform and --gemm"
        )
    other = [
        f"{name} {old} there and {new} here"
        for name, old in saved[0].versions.items()
        if old and name != "python" and (new := version(name)) not in (old, None)
    ]
    notes = [f"warning: compiled with other versions: {', '.join(other)}"] if other else []
    return Arm(label=Path(path).name, saved=tuple(saved), notes=tuple(notes))
