"""The command line `linen-compat`, with its commands `inspect`, `check` and `convert`."""

import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

# Otherwise the compilers warn about hardware that is not there; errors are still shown.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click
import jax

from linen_compat.check import check_names, compare_numerics, diagnose, read_everything
from linen_compat.cli import views
from linen_compat.cli.overhead import overhead
from linen_compat.convert import TARGETS, From, To, plan
from linen_compat.formats.orbax.inspect import Inspection, inspect
from linen_compat.formats.streams import Mismatch
from linen_compat.named_config import read_config
from nnx_pipeline import InputError
from nnx_pipeline.cli.options import bundled
from nnx_pipeline.cli.support import Failed, main_of
from nnx_pipeline.errors import counted
from nnx_pipeline.lab.report.output import check_writable, emit_json, show

_FORMATS = ", ".join(TARGETS)


class _Commands(click.Group):
    """Gives a `Mismatch` the exit code 1, as the arguments were fine and the checkpoint was not."""

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
    """Inspect, check and convert MaxText and Hugging Face checkpoints; measure wrapper cost."""
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata it can do without


@cli.command(
    "inspect",
    short_help="Show the tree of a checkpoint.",
    epilog="Example: linen-compat inspect runs/mixtral/checkpoints",
)
@click.argument("checkpoint", metavar="CKPT")
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - is standard output.")
def inspect_command(checkpoint: str, json_path: str | None) -> None:
    """Show layout, parameter count, dtypes and tree of a MaxText or nnx checkpoint.

    CKPT is a run (its latest step is taken), a step, or its folder of arrays. No array is read.
    """
    check_writable(json_path, "--json")
    found = inspect(checkpoint)
    layout = found.layout
    dtypes = Counter(leaf.dtype for leaf in found.parameters.values())
    kinds = ", ".join(f"{dtype} ({count} leaves)" for dtype, count in dtypes.items())
    dense = f" ({layout.num_dense_layers} of them dense)" if layout.num_dense_layers else ""
    show(
        f"{layout.format}: {counted(layout.num_layers, 'layer')}{dense}, "
        f"{counted(layout.stages, 'stage')}, {counted(layout.repeats, 'repeat')}; "
        f"{found.parameter_count:,} parameters in {kinds}; {_others(list(found.other))}",
        json_path=json_path,
    )
    show(views.inspection(found), json_path=json_path)
    emit_json(json_path, _as_json(found))


def _others(names: list[str]) -> str:
    """How many leaves are no parameters, and what they are, as the optimizer's state and a step."""
    roots = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
    count = "1 other leaf" if len(names) == 1 else f"{len(names)} other leaves"
    return f"{count} ({roots})" if names else "no other leaves"


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


@cli.command(
    short_help="Say what a model would take from one.",
    epilog="Example: linen-compat check runs/mixtral/checkpoints --config mixtral.yml",
)
@click.argument("checkpoint", metavar="CKPT")
@click.option(
    "--config",
    "config_name",
    required=True,
    metavar="FILE",
    help="A MaxText YAML, a YAML with model, pipeline and train, a config.json of Hugging Face or "
    "its folder, or a preset.",
)
@click.option("--read", is_flag=True, help="Read every byte too, to find damage and NaN.")
@click.option(
    "--numerics", is_flag=True, help="Compare each layer's result with MaxText's mathematics."
)
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
    """Say which leaves a model would take from a checkpoint and which stay randomly initialised.

    Reads only metadata and the step counts, unless --read or --numerics is given. Exit 1 unless
    everything fits. The state of another optimizer than AdamW is no misfit: what becomes of it is
    said.
    """
    if allow_nan and not read:
        raise InputError("--allow-nan has no effect without --read; add --read or leave it out")
    check_writable(json_path, "--json")
    config = read_config(config_name, checkpoint)
    found = diagnose(checkpoint, config)
    if numerics:
        check_names(found)
    result: dict[str, Any] = {**found.to_json(), "read_bytes": None, "numerics": None}
    if found.format is not None:  # else the error says all there is to say
        show(views.diagnosis(found), json_path=json_path)
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
        first_difference = compare_numerics(checkpoint, config)
        result["numerics"] = vars(first_difference)
        show(views.first_difference(first_difference), json_path=json_path)
        if first_difference.place is not None:
            problems.append(f"{first_difference.place} differs from MaxText's mathematics")
    result = {**result, "problems": problems, "fits": not problems}
    emit_json(json_path, result)
    if problems:
        raise Failed(f"{checkpoint} does not fit {config_name}: {views.first_of(problems)}")


@dataclass(frozen=True)
class Source:
    """The checkpoint to convert, as given by SRC, `--from`, `--config` and `--parameters-only`.

    - `checkpoint`: the folder of the checkpoint.
    - `source_format`: its format, or `auto`.
    - `config_name`: the file or the preset that it must fit; None for no such check.
    - `parameters_only`: whether to leave out the optimizer's state.
    """

    checkpoint: str
    source_format: str
    config_name: str | None
    parameters_only: bool

    def opened(self) -> From:
        """The same source as `convert.From`, with the config file read."""
        config = read_config(self.config_name) if self.config_name else None
        return From(self.checkpoint, self.source_format, config, self.parameters_only)


@cli.command(
    short_help="Write it in another format.",
    epilog="Example: linen-compat convert runs/7/items circular --to maxtext:pipelined "
    "--stages 4 --repeats 2",
)
@bundled(
    "source",
    Source,
    click.argument("checkpoint", metavar="SRC"),
    click.option(
        "--from",
        "source_format",
        default="auto",
        show_default=True,
        metavar="FORMAT",
        help=f"The format of SRC: {_FORMATS}; auto recognises it.",
    ),
    click.option("--config", "config_name", metavar="FILE", help="The config that SRC must fit."),
    click.option(
        "--parameters-only",
        is_flag=True,
        help="Leave the optimizer's state behind, whichever optimizer's it is.",
    ),
)
@bundled(
    "target",
    To,
    click.argument("path", metavar="DST"),
    click.option(
        "--to", "format", required=True, metavar="FORMAT", help=f"The format of DST: {_FORMATS}."
    ),
    click.option(
        "--stages", type=click.IntRange(min=1), help="Stages of maxtext:pipelined or nnx."
    ),
    click.option(
        "--repeats",
        type=click.IntRange(min=1),
        help="Repeats of maxtext:pipelined or nnx; 2 or more make the pipeline circular.",
    ),
)
@click.option("--allow-nan", is_flag=True, help="Keep NaN and infinity.")
def convert(source: Source, target: To, allow_nan: bool) -> None:
    """Write a checkpoint in another format or layout, one array at a time.

    DST must be a new name or an empty folder. It is filled under a temporary name, and gets its own
    name when everything is written. Every byte that is copied is read and checked.
    """
    prepared = plan(source.opened(), target)
    with views.byte_bar("converting", prepared.nbytes) as passed:
        prepared.run(allow_nan=allow_nan, progress=passed)
    show(views.conversion(prepared), json_path=None)


cli.add_command(overhead)

main = main_of(cli, "linen-compat")

if __name__ == "__main__":
    main()
