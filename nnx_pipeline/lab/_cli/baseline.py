"""The options `compare --baseline` and `--with`: one program beside what it was or would be."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nnx_pipeline.lab._baseline.environment import (
    HERE,
    Environment,
    Unavailable,
    environment_with,
    folder_of_user,
    parse_wanted,
)
from nnx_pipeline.lab._baseline.lines import Changes, in_present_lines
from nnx_pipeline.lab._baseline.process import Files, run_with
from nnx_pipeline.lab._baseline.repository import Repository
from nnx_pipeline.lab._baseline.saved import measurements_of, saved_measurements
from nnx_pipeline.lab._cli.outputs import Outputs
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject, is_function
from nnx_pipeline.lab._cli.support import BAD_INPUT, Failed
from nnx_pipeline.lab._cli.values import Baseline, Target
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab.comparison.outcome import Outcome, Question, compare_measurements
from nnx_pipeline.lab.compile._packages import version
from nnx_pipeline.lab.compile.measure import Measurement, Progress
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError

NOW = "now"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Where a program comes from: files of a revision, packages of an environment, or a file.

    - `label`: what it is called.
    - `environment`, `files`: with what it is compiled; None for the present files.
    - `changes`: between its files and the present ones.
    - `saved`: what was measured before; where there is some, nothing is compiled.
    - `notes`: what the reader should know of it.
    """

    label: str
    environment: Environment = HERE
    files: Files | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)
    saved: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    def measured(self, words: Sequence[str], say: Progress) -> list[Measurement] | str:
        """Its programs, one for each kind of matrix products, or why there is none."""
        if self.saved:
            return [*self.saved]
        told = functools.partial(_told, say, self.label)
        command = ["memory", *words, "--top", "1"]
        done = run_with(command, environment=self.environment, files=self.files, say=told)
        if done.result is None:
            if done.code == BAD_INPUT:
                raise InputError(f"{self.label}: {done.reason}")
            return done.reason
        found = measurements_of(done.result, self.label)
        if self.files is None:
            return found
        present = functools.partial(
            in_present_lines, files=self.files.folder, root=self.files.root, changes=self.changes
        )
        return [*map(present, found)]


def _told(say: Progress, label: str, line: str) -> None:
    say(f"{label}: {line}")


def run_baseline(subject: Subject, given: Baseline, target: Target, outputs: Outputs) -> None:
    """Compares a program with what it was at a revision, or would be with other packages."""
    platforms = target.platforms()
    if platforms[0].kind == "local":
        raise InputError("--baseline compiles for cpu, tpu, cuda and rocm; found --platform local")
    with progress() as say, _first_arm(subject, given, platforms, say) as (before, words):
        now = Arm(label=given.present() if given.packages and not given.baseline else NOW)
        before_and_now = _both(before, now, [*words, *target.words()], say)
    outcomes = _outcomes(subject, (before, now), before_and_now, len(platforms))
    title = f"{subject.title(target.mesh_config)}, {target.platform}: per device"
    report.show_outcomes(title, outcomes, target.platform, json_path=outputs.json_path)
    outputs.say_words(*_WORDS)
    outputs.write_outcomes(title, outcomes)
    if failed := [outcome.note for (outcome,) in outcomes if outcome.failed]:
        raise Failed("; ".join(dict.fromkeys(failed)))


_WORDS = (words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)


def _both(
    before: Arm, now: Arm, words: Sequence[str], say: Progress
) -> tuple[list[Measurement] | str, list[Measurement] | str]:
    # Each is compiled in a process of its own, so that two threads are enough to do both at once.
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(arm.measured, words, say) for arm in (before, now)]
        one, other = (each.result() for each in waiting)
    return one, other


def _outcomes(
    subject: Subject,
    arms: tuple[Arm, Arm],
    measured: tuple[list[Measurement] | str, list[Measurement] | str],
    programs: int,
) -> list[list[Outcome]]:
    before, now = arms
    question = Question(
        name="compare",
        claim="",
        difference=f"{subject.name}: {before.label} and {now.label}",
        labels=(before.label, now.label),
        judged_by="account",
    )
    rows = [[one] * programs if isinstance(one, str) else one for one in measured]
    outcomes = [compare_measurements(question, a, b) for a, b in zip(*rows, strict=True)]
    notes = [*before.notes, *_other_inputs(outcomes[0])]
    return [
        [dataclasses.replace(one, note="; ".join(filter(None, [*notes, one.note])))]
        for one in outcomes
    ]


def _other_inputs(outcome: Outcome) -> list[str]:
    """What else differs between the arms than the program."""
    one, other = outcome.a, outcome.b
    if one is None or other is None:
        return []
    before, after = one.config.get("arguments"), other.config.get("arguments")
    notes = []
    if before != after:
        notes.append("warning: the arguments differ in shape, dtype or sharding")
    return notes


@contextlib.contextmanager
def _first_arm(
    subject: Subject, given: Baseline, platforms: Sequence[Platform], say: Progress
) -> Iterator[tuple[Arm, list[str]]]:
    """What is compared with, and the words that name the program also there."""
    if given.is_file:
        yield _saved_arm(given, platforms), subject.words()
        return
    environment = HERE
    if given.packages:
        wanted = [parse_wanted("--with", text) for text in given.packages]
        folder, kind = folder_of_user("--with"), platforms[0].kind
        try:
            environment = environment_with(wanted, kind, folder, say)
        except Unavailable as error:
            raise Failed(str(error)) from error
    if given.baseline is None:
        yield Arm(label=", ".join(given.packages), environment=environment), subject.words()
        return
    repository = Repository.here()
    commit = repository.commit(given.baseline)
    label = ", ".join([f"{given.baseline} ({commit.id[:9]})", *given.packages])
    with repository.files_of(commit) as folder:
        files = Files(repository.root, folder)
        there = named_from_here(subject, repository.root)
        notes = [
            f"{name} is not in {given.baseline}: that of now is taken"
            for name in copied(there, files)
        ]
        changes = repository.changes(commit)
        arm = Arm(
            label=label, environment=environment, files=files, changes=changes, notes=tuple(notes)
        )
        yield arm, there.words()


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


def named_from_here(subject: Subject, root: Path) -> Subject:
    """The same with paths from the current folder, which other files have a folder for."""

    def relative(name: str | None) -> str | None:
        path, colon, function = (name or "").rpartition(":")
        inside = path.endswith(".py") and Path(path).resolve().is_relative_to(root.resolve())
        return f"{os.path.relpath(path)}{colon}{function}" if inside else name

    inputs = dataclasses.replace(subject.inputs, inputs=relative(subject.inputs.inputs))
    return dataclasses.replace(subject, name=str(relative(subject.name)), inputs=inputs)


def copied(subject: Subject, files: Files) -> list[str]:
    """Adds the files that say what to measure where a revision has none; returns their names."""
    added = []
    for name in filter(None, (subject.name, subject.inputs.inputs)):
        module = name.rpartition(":")[0]
        file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
        there = files.here() / file
        if is_function(name) and not file.is_absolute() and file.is_file() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)
            added.append(str(file))
    return added
