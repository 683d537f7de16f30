"""The option `compare --list`."""

from nnx_pipeline.experiments._registry import ELSEWHERE, EXPERIMENTS
from nnx_pipeline.lab._report.columns import Column, Columns
from nnx_pipeline.lab._report.output import emit_json, show


def list_experiments(json_path: str | None) -> None:
    """Shows all experiments, and the claims that another command measures."""
    heads = [Column("experiment"), Column("claim", 2), Column("short set", 1)]
    table = Columns([*heads, Column("difference", is_prose=True)])
    for item in EXPERIMENTS.values():
        table.add_row(item.name, item.claim, "yes" if item.by_default else "", item.difference)
    for claim, (command, difference) in ELSEWHERE.items():
        table.add_row(command, claim, "", f"{difference} (a separate command)")
    show(table, json_path=json_path)
    rows = [
        {
            "name": item.name,
            "claim": item.claim,
            "difference": item.difference,
            "kind": item.kind,
            "by_default": item.by_default,
        }
        for item in EXPERIMENTS.values()
    ]
    elsewhere = [
        {"command": command, "claim": claim, "difference": difference}
        for claim, (command, difference) in ELSEWHERE.items()
    ]
    emit_json(json_path, {"schema": 1, "experiments": rows, "elsewhere": elsewhere})
