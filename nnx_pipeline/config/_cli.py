"""The command `models`."""

import click

from nnx_pipeline.config.config import to_dict
from nnx_pipeline.config.parameter_count import count_parameters
from nnx_pipeline.config.presets import PRESETS
from nnx_pipeline.lab._cli.options import json_option

# The columns of `models` after the name, and the order in which a narrow screen leaves them out.
_NAMES = ("parameters", "active", "layers", "embed", "mlp", "heads", "kv", "experts", "vocab")
_ORDER = (0, 0, 1, 2, 6, 5, 7, 3, 4)


@click.command(
    "models", short_help="List the presets.", epilog="Example: nnx-pipeline models --json -"
)
@json_option
def models_command(json_path: str | None) -> None:
    """List the presets with their parameter counts."""
    from nnx_pipeline.lab._report.columns import Column, Columns
    from nnx_pipeline.lab._report.output import check_writable, emit_json, show

    check_writable(json_path, "--json")
    figures = (Column(*pair, is_number=True) for pair in zip(_NAMES, _ORDER, strict=True))
    table = Columns([Column("model"), *figures])
    rows = []
    for name, config in PRESETS.items():
        model, count = config.model, count_parameters(config.model)
        experts = "dense"
        if model.num_experts > 1:
            experts = f"{model.num_experts_per_token} of {model.num_experts}"
        sizes = (model.num_layers, model.embed_dim, model.mlp_dim, model.num_heads)
        cells = map(str, (*sizes, model.num_kv_heads, experts, model.vocab_size))
        table.add_row(name, _count(count.total), _count(count.active), *cells)
        counts = {"parameters": count.total, "active_parameters": count.active}
        rows.append({"name": name, **counts, "config": to_dict(config)})
    show(table, json_path=json_path)
    emit_json(json_path, {"schema": 1, "models": rows})


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
