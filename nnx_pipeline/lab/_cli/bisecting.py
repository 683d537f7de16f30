"""The command `bisect`: after which commit, or version of a package, a program needs more."""

from __future__ import annotations

import click

from nnx_pipeline.lab._cli import options
from nnx_pipeline.lab._cli.subject import GivenArguments, OfSubject, subject_of, subject_options
from nnx_pipeline.lab._cli.values import Chosen, Target


@click.command(
    "bisect",
    cls=OfSubject,
    short_help="Find the commit after which it needs more.",
    epilog="Example: nnx-pipeline bisect v1.2 main my_model:train_step --inputs my_model:inputs "
    "--platform tpu:v5p:2x2x2, or nnx-pipeline bisect jax==0.10.2 jax==0.12.0.1 tiny --mesh fsdp=8",
)
@click.argument("good")
@click.argument("bad")
@subject_options
@options.target_options()
@click.option(
    "--limit",
    metavar="[FIGURE=]VALUE",
    help="Where it is crossed: 5% above GOOD, 24MB, 1.5GiB, 20ms. The figure is account (default), "
    "heap, temp, peak or step. Without it half of the difference between GOOD and BAD.",
)
@options.json_option
def bisect_command(
    good: str,
    bad: str,
    name: str | None,
    inputs: GivenArguments,
    chosen: Chosen,
    target: Target,
    limit: str | None,
    json_path: str | None,
) -> None:
    """Find the first commit after which a program needs more memory or time than a limit.

    GOOD and BAD are git revisions, or two versions of a package (jax==0.10.2), of which GOOD may be
    the newer one: then the last version is found that needs more. SUBJECT is a preset,
    MODULE:FUNCTION or FILE.py:FUNCTION. Each step compiles the program as it was at one commit
    between them, in the middle of those that are left. Commits are taken along the first parents;
    where a merge crosses the limit, the search goes on in the branch that it merged. A commit that
    does not compile is passed over. Exit 1 when BAD is not beyond the limit, or GOOD is.
    """
    subject = subject_of(name, chosen, inputs, target.mesh, target.dcn)
    from nnx_pipeline.lab._report.output import check_writable

    check_writable(json_path, "--json")
    target = target.settled(on_mesh=subject.config is not None)
    from nnx_pipeline.lab._cli.bisected import run_bisect

    run_bisect((good, bad), subject, target, limit, json_path)
