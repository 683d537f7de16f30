"""The command `models`."""

import click

from nnx_pipeline.config._counts import count_parameters
from nnx_pipeline.config.config import to_dict
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.lab._cli.options import json_option

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


@click.command(
    "models", short_help="List the presets.", epilog="Example: nnx-pipeline models --json -"
)
@json_option
def models_command(json_path: str | None) -> None:
    """List the presets with their parameter counts."""
    from nnx_pipeline.lab._report.columns import Column, Columns
    from nnx_pipeline.lab._report.output import check_writable, emit_json, show

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


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f} B"
    return f"{parameters / 1e6:.2f} M"
