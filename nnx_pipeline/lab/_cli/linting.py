"""What the command `lint` does."""

import functools
from collections.abc import Callable
from typing import Any

from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.lab.lint import Finding, Limits, lint
from nnx_pipeline.lab.lint._report import findings_json, findings_view
from nnx_pipeline.lab.mesh import MeshConfig


def run_lint(subject: Subject, mesh: MeshConfig, limits: Limits, json_path: str | None) -> None:
    """Shows the findings in a subject; raises Failed where there are any."""
    find: Callable[[MeshConfig, Limits], list[Finding]]
    if subject.config is None:
        find = functools.partial(_in_function, subject)
    else:
        find = functools.partial(presets().lint_config, subject.config)
    # 1 means findings, so that a function that cannot be traced ends with 2.
    with progress() as say, compiler_errors(InputError):
        say("tracing")
        findings = find(mesh, limits)
    show(findings_view(subject.title(mesh), findings), json_path=json_path)
    told: dict[str, Any] = {"mesh": mesh.sizes()}
    if subject.config is None:
        told["function"] = subject.name
    else:
        told["config"] = presets().to_dict(subject.config)
    emit_json(json_path, findings_json(told, findings, limits))
    if findings:
        raise Failed(counted(len(findings), "finding"))


def _in_function(subject: Subject, mesh: MeshConfig, limits: Limits) -> list[Finding]:
    # Linting only traces, so virtual CPU devices can stand for any others.
    grid, given = subject.inputs.on(mesh, Platform("cpu"))
    return lint(find_function(subject.name), *given, mesh=grid, limits=limits)
