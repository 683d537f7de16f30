"""The commands that search: `bisect` the commit after which a program needs more, and `fit` the
largest number with which it fits."""

from __future__ import annotations

from dataclasses import dataclass

import click

from nnx_pipeline.lab._cli import options
from nnx_pipeline.lab._cli.subject import GivenArguments, OfSubject, subject_of, subject_options
from nnx_pipeline.lab._cli.values import Chosen, Target
from nnx_pipeline.lab.errors import InputError
from nnx_pipeline.lab.search.over import MemoryLimit, Over

REMAT = "remat"  # what --over names where what is kept is searched


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
@options.target_options(by_one=True)
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


@dataclass(frozen=True)
class Wanted:
    over: tuple[str, ...]
    limit: str


@click.command(
    "fit",
    cls=OfSubject,
    short_help="Find the largest batch that fits.",
    epilog="Example: nnx-pipeline fit my_model:train_step --inputs my_model:inputs --over "
    "batch=1..512 --platform cuda:h100:1, or nnx-pipeline fit mixtral-small --mesh fsdp=8 --over "
    "train.sequence_length=256..65536:256 --limit 95% --platform tpu:v5p:2x2x2, or nnx-pipeline "
    "fit mixtral-small --mesh stage=4,fsdp=2 --over remat --limit 300MB --platform tpu:v5p:2x2x2",
)
@subject_options
@options.target_options(by_one=True)
@options.bundled(
    "wanted",
    Wanted,
    click.option(
        "--over",
        required=True,
        multiple=True,
        metavar="NAME=LOW..HIGH[:STEP]|remat",
        help="The number and its values: a parameter of the function of --inputs, such as "
        "batch=1..512 or batch=8..512:8, or a config field of a preset. With remat the fastest "
        "program is found.",
    ),
    options.memory_limit_option,
)
@options.json_option
def fit_command(
    name: str | None,
    inputs: GivenArguments,
    chosen: Chosen,
    target: Target,
    wanted: Wanted,
    json_path: str | None,
) -> None:
    """Find the largest number with which a program fits: batch, sequence, layers, or any other.

    SUBJECT is a preset, MODULE:FUNCTION or FILE.py:FUNCTION. The function of --inputs is called
    with each value that is tried, by name. What must fit is the account: arguments, outputs not
    aliased to them, constants and heap, per device. A curve through the figures so far chooses the
    next value, and its compile decides. The value that is found fits and the next one does not:
    both were compiled. Where memory does not grow with the number, a larger one may fit too.

    Before it starts it says how many compiles may come. Ctrl-C shows what there is so far. Programs
    are kept, so that the same command goes on from there. A value that fails is passed over, up to
    three of them; LOW may not. For NVIDIA and AMD the program is compiled with matrix products by
    Triton, unless --gemm chooses the other library. Exit 1 when LOW does not fit.

    With --over remat it finds what the backward pass is to keep, compute again or offload to the
    host, so that the step is the fastest one within the limit: for each value with a name
    (jax.ad_checkpoint.checkpoint_name) and each loop without jax.checkpoint. A model of the figures
    so far chooses what is compiled next. It shows the frontier, memory against time, and what to
    write.
    """
    over, *others = wanted.over
    if others:
        raise InputError(
            f"--over {over} --over {others[0]}: fit searches one thing; give it once, and set the "
            "other one with --set, or in the function of --inputs"
        )
    values = None if over == REMAT else Over.parse(over)
    is_whole = values is None
    subject = subject_of(name, chosen, inputs, target.mesh, target.dcn, is_whole=is_whole)
    from nnx_pipeline.lab._report.output import check_writable

    check_writable(json_path, "--json")
    if target.gemm == "both":
        raise InputError(
            "--gemm both: with fit one kind of matrix products is compiled; write --gemm triton or "
            "--gemm cublas"
        )
    platform = target.settled(on_mesh=subject.config is not None).platforms()[0]
    if values is None:
        from nnx_pipeline.lab._cli.changing.keeping import run_remat

        run_remat(subject, platform, wanted.limit, json_path)
        return
    most = MemoryLimit.parse(wanted.limit, platform)
    from nnx_pipeline.lab._cli.fitted import Asked, run_fit

    run_fit(Asked(subject, values, platform), most, json_path)
