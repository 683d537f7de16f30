"""What the command `lint` does; apart from the others, since it needs no compiler."""

from nnx_pipeline.lab._cli.presets import presets
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Subject
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._report.output import emit_json, show
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import InputError, counted
from nnx_pipeline.lab.lint import Limits, lint
from nnx_pipeline.lab.lint._report import findings_view
from nnx_pipeline.lab.mesh import MeshConfig


def run_lint(subject: Subject, limits: Limits, json_path: str | None) -> None:
    # 1 means findings, so that a function that cannot be traced ends with 2.
    with progress() as say, compiler_errors(InputError):
        say("tracing")
        if isinstance(subject.mesh, MeshConfig):
            findings = presets().lint_config(subject.config, subject.mesh, limits)
        else:
            # Linting only traces, so virtual CPU devices can stand for any others.
            grid, arguments = subject.inputs.on(subject.mesh, Platform("cpu"))
            findings = lint(find_function(subject.name), *arguments, mesh=grid, limits=limits)
    show(findings_view(subject.title(), findings), json_path=json_path)
    linted: dict[str, object] = {"schema": 1, "mesh": subject.mesh.sizes()}
    if subject.config is None:
        linted["function"] = subject.name
    else:
        linted["config"] = presets().to_dict(subject.config)
    linted["limits"] = {"large_bytes": limits.large, "one_hot_bytes": limits.one_hot}
    linted["findings"] = [finding.to_json() for finding in findings]
    emit_json(json_path, linted)
    if findings:
        raise Failed(counted(len(findings), "finding"))
