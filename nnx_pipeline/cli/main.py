"""The command `nnx-pipeline`, with those of its subcommands that have no file of their own."""

import os

# Without this the compilers warn that there is no accelerator; their errors are still printed.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import click

from nnx_pipeline.cli.ab import ab_command
from nnx_pipeline.cli.across import run_across
from nnx_pipeline.cli.functions import compare_command, lint_command, measure_command
from nnx_pipeline.cli.generate import generate_command
from nnx_pipeline.cli.memory import memory_command
from nnx_pipeline.cli.options import (
    Chosen,
    Target,
    check_alone,
    config_options,
    json_option,
    step_title,
    target_options,
)
from nnx_pipeline.cli.reports import explain_option, say_words
from nnx_pipeline.cli.schedule import schedule_command
from nnx_pipeline.cli.support import compiler_errors, main_of, progress
from nnx_pipeline.cli.train import train_command
from nnx_pipeline.config.config import to_dict
from nnx_pipeline.config.counts import count_parameters
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.experiments.advice import ADVICE
from nnx_pipeline.experiments.programs import measure_step
from nnx_pipeline.files import write_text
from nnx_pipeline.lab.report import tables as report
from nnx_pipeline.lab.report import words
from nnx_pipeline.lab.report.columns import Column, Columns
from nnx_pipeline.lab.report.output import check_outputs, check_writable, emit_json, show

# The columns of `models` after the name, and the order in which a narrow screen leaves them out.
_OF_MODELS = (
    ("parameters", 0),
    ("active", 0),
    ("layers", 1),
    ("embed", 2),
    ("mlp", 6),
    ("heads", 5),
    ("kv", 7),
    ("experts", 3),
    ("vocab", 4),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="nnx-pipeline")
def cli() -> None:
    """Pipelined Mixtral-class models in Flax NNX, and what they cost, without an accelerator."""


@cli.command(short_help="List the presets.", epilog="Example: nnx-pipeline models --json -")
@json_option
def models(json_path: str | None) -> None:
    """List the presets with their parameter counts."""
    check_writable(json_path, "--json")
    table = Columns([Column("model"), *(Column(*one, is_number=True) for one in _OF_MODELS)])
    rows = []
    for name, config in PRESETS.items():
        model, count = config.model, count_parameters(config.model)
        experts = (
            f"{model.num_experts_per_token} of {model.num_experts}"
            if model.num_experts > 1
            else "dense"
        )
        sizes = (model.num_layers, model.embed_dim, model.mlp_dim, model.num_heads)
        table.add_row(
            name,
            _count(count.total),
            _count(count.active),
            *map(str, (*sizes, model.num_kv_heads)),
            experts,
            str(model.vocab_size),
        )
        rows.append(
            {
                "name": name,
                "parameters": count.total,
                "active_parameters": count.active,
                "config": to_dict(config),
            }
        )
    show(table, json_path=json_path)
    emit_json(json_path, {"schema": 1, "models": rows})


@cli.command(
    "compile",
    short_help="Compile a training step: what it costs.",
    epilog="Example: nnx-pipeline compile --model mixtral-small --mesh stage=4,fsdp=2 "
    "--platform tpu:v5p:2x2x2 --set pipeline.num_microbatches=8",
)
@config_options(None)
@target_options("")
@click.option("--hlo", "hlo_path", metavar="PATH", help="Write the optimized program as text.")
@click.option(
    "--across",
    metavar="jax=V,V,…",
    help="Compile it with each of these versions of JAX and compare, such as jax=0.10.2,0.12.0.1. "
    "Environments with them are built by pip and kept in the cache folder.",
)
@json_option
@explain_option
def compile_command(
    chosen: Chosen,
    target: Target,
    hlo_path: str | None,
    across: str | None,
    json_path: str | None,
    explain: bool,
) -> None:
    """Compile one training step: memory, time, and whether it fits.

    For NVIDIA it is compiled twice: with matrix products by Triton and by cuBLASLt. The JSON has
    the second program under `other_gemm`.
    """
    check_outputs(json=json_path, hlo=hlo_path)
    if across is not None:
        check_alone(
            "across", "model", "assignments", "mesh", "platform", "gemm", "xla", "json_path"
        )
        run_across(across, chosen, target, json_path)
        return
    config, mesh_config = chosen.config(), target.mesh_config
    platforms = target.platforms()
    with progress() as say, compiler_errors():
        results = [measure_step(config, mesh_config, one, progress=say) for one in platforms]
    title = step_title(chosen.model, config, mesh_config)
    report.show_measurements(title, results, json_path=json_path, advice=ADVICE)
    say_words(explain, json_path, words.MEMORY, words.TIME)
    if hlo_path:
        write_text(hlo_path, results[0].hlo)


def _count(parameters: int) -> str:
    """A parameter count in billions (B) or millions (M)."""
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f} B"
    return f"{parameters / 1e6:.2f} M"


for command in (
    ab_command,
    measure_command,
    compare_command,
    memory_command,
    lint_command,
    schedule_command,
    train_command,
    generate_command,
):
    cli.add_command(command)

main = main_of(cli, "nnx-pipeline")
if __name__ == "__main__":
    main()
