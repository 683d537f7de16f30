"""The command `linen-compat`."""

import logging
import os
from collections import Counter
from typing import Any

# Without this the compilers warn about hardware that is not there; their errors still come through.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import jax

from linen_compat import cli_views as views
from linen_compat.checkpoint import Inspection, inspect
from linen_compat.convert import TARGETS, plan
from linen_compat.doctor import check_names, compare_numerics, diagnose, read_everything
from linen_compat.maxtext_config import read_config
from linen_compat.overhead_cli import overhead
from linen_compat.streams import Mismatch
from nnx_pipeline import InputError
from nnx_pipeline.cli_support import Failed, main_of
from nnx_pipeline.lab import report

_FORMATS = f"{', '.join(TARGETS)}"


class _Commands(click.Group):
    """Ends what a checkpoint lacks with exit code 1: the arguments were fine."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Mismatch as error:
            raise Failed(str(error)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="nnx-pipeline")
def cli() -> None:
    """Legacy Linen checkpoints beside nnx-pipeline."""
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without


@cli.command("inspect", epilog="Example: linen-compat inspect runs/mixtral/checkpoints")
@click.argument("checkpoint", metavar="CKPT")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def inspect_command(checkpoint: str, json_path: str | None) -> None:
    """Show layout, parameter count, dtypes and tree of a MaxText checkpoint.

    CKPT is a run (its latest step is taken), a step, or an items folder. No array is read.
    """
    report.check_writable(json_path, "--json")
    found = inspect(checkpoint)
    layout = found.layout
    dtypes = Counter(leaf.dtype for leaf in found.parameters.values())
    kinds = ", ".join(f"{dtype} ({count} leaves)" for dtype, count in dtypes.items())
    report.show(
        f"{layout.format}: {layout.num_layers} layers, {layout.stages} stages, {layout.repeats} "
        f"repeats; {found.parameter_count:,} parameters in {kinds}; "
        f"{len(found.other)} other leaves",
        json_path=json_path,
    )
    report.show(views.inspection(found), json_path=json_path)
    report.emit_json(json_path, _as_json(found))


def _as_json(found: Inspection) -> dict[str, object]:
    def leaves(tree: dict[str, object]) -> dict[str, object]:
        return {name: vars(leaf) for name, leaf in tree.items()}

    return {
        "schema": 1,
        "layout": found.layout.format,
        "num_layers": found.layout.num_layers,
        "stages": found.layout.stages,
        "repeats": found.layout.repeats,
        "parameter_count": found.parameter_count,
        "parameters": leaves({**found.parameters}),
        "other": leaves({**found.other}),
    }


@cli.command(epilog="Example: linen-compat check runs/mixtral/checkpoints --config mixtral.yml")
@click.argument("checkpoint", metavar="CKPT")
@click.option(
    "--config",
    "config_name",
    required=True,
    metavar="FILE",
    help="A MaxText YAML, a YAML with model, pipeline and train, or a preset.",
)
@click.option("--read", is_flag=True, help="Read every byte: refuse truncation and NaN.")
@click.option("--numerics", is_flag=True, help="Compare logits with MaxText's mathematics.")
@click.option("--allow-nan", is_flag=True, help="With --read, let NaN and infinity pass.")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def check(
    checkpoint: str,
    config_name: str,
    read: bool,
    numerics: bool,
    allow_nan: bool,
    json_path: str | None,
) -> None:
    """Say which leaves a model would take from a checkpoint, and which it would begin afresh.

    From metadata alone. Exit 1 unless every leaf is accounted for.
    """
    if allow_nan and not read:
        raise InputError("--allow-nan is about what --read reads; add --read or leave it out")
    report.check_writable(json_path, "--json")
    config = read_config(config_name)
    found = diagnose(checkpoint, config)
    if numerics:
        check_names(found)
    result: dict[str, Any] = {**found.to_json(), "read_bytes": None, "numerics": None}
    report.show(views.diagnosis(found), json_path=json_path)
    problems = list(found.comparison.problems)
    if read and not problems:
        try:
            with views.byte_bar("reading", None) as passed:
                result["read_bytes"] = read_everything(
                    found, config, allow_nan=allow_nan, progress=passed
                )
        except Mismatch as error:
            problems.append(str(error))
    if numerics and not problems:
        parting = compare_numerics(checkpoint, config)
        result["numerics"] = vars(parting)
        report.show(views.parting(parting), json_path=json_path)
        if parting.place is not None:
            problems.append(f"{parting.place} differs from MaxText's mathematics")
    result = {**result, "problems": problems, "fits": not problems}
    report.emit_json(json_path, views.printable(result))
    if problems:
        raise Failed(f"{checkpoint} does not fit {config_name}: {views.first_of(problems)}")


@cli.command(
    epilog="Example: linen-compat convert runs/7/items circular --to maxtext:pipelined "
    "--stages 4 --repeats 2"
)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--from", "source_format", default="auto", show_default=True, metavar="FORMAT")
@click.option("--to", "target_format", required=True, metavar="FORMAT", help=_FORMATS)
@click.option("--config", "config_name", metavar="FILE", help="What the checkpoint must fit.")
@click.option("--stages", type=click.IntRange(min=1), help="Stages of a pipelined target.")
@click.option("--repeats", type=click.IntRange(min=1), help="Its repeats; more make it circular.")
@click.option("--parameters-only", is_flag=True, help="Leave the optimizer's state behind.")
@click.option("--allow-nan", is_flag=True, help="Keep NaN and infinity.")
def convert(
    source: str,
    destination: str,
    source_format: str,
    target_format: str,
    config_name: str | None,
    stages: int | None,
    repeats: int | None,
    parameters_only: bool,
    allow_nan: bool,
) -> None:
    """Write a checkpoint in another format or layout, one array at a time.

    DST is a new folder; it appears when it is complete. Every byte that is copied is read and
    checked.
    """
    prepared = plan(
        source,
        destination,
        source_format=source_format,
        target_format=target_format,
        config=read_config(config_name) if config_name else None,
        stages=stages,
        repeats=repeats,
        parameters_only=parameters_only,
    )
    with views.byte_bar("converting", prepared.nbytes) as passed:
        prepared.run(allow_nan=allow_nan, progress=passed)
    report.show(views.conversion(prepared), json_path=None)


cli.add_command(overhead)

main = main_of(cli, "linen-compat")

if __name__ == "__main__":
    main()
