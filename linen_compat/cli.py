"""The command `linen-compat`."""

import logging
import os
from collections import Counter

# Without this the compilers warn about hardware that is not there; their errors still come through.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import jax
from rich.table import Table

from linen_compat.checkpoint import Inspection, inspect
from nnx_pipeline.cli_support import main_of
from nnx_pipeline.lab import report


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    report.show(_tree(found), json_path=json_path)
    report.emit_json(json_path, _as_json(found))


def _tree(found: Inspection) -> Table:
    table = Table()
    for column in ("parameter", "shape", "dtype"):
        table.add_column(column, no_wrap=True)
    for name, leaf in found.parameters.items():
        table.add_row(name, "×".join(map(str, leaf.shape)), leaf.dtype)
    return table


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


main = main_of(cli, "linen-compat")
