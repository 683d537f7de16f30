"""The command `explain`, and what it does."""

from __future__ import annotations

import sys

import click

from nnx_pipeline.lab._cli import options
from nnx_pipeline.lab._cli.outputs import Outputs
from nnx_pipeline.lab.errors import InputError


@click.command(
    "explain",
    short_help="Explain an out-of-memory text or a dump.",
    epilog="Example: nnx-pipeline explain error.log, or XLA_FLAGS='--xla_dump_to=dump "
    "--xla_dump_hlo_as_text' python train.py and then nnx-pipeline explain dump",
)
@click.argument("source", metavar="FILE|DIR")
@options.top_option
@options.report_options
def explain_command(source: str, top: int, outputs: Outputs) -> None:
    """Say what a program that others compiled holds in memory, and what would make it smaller.

    FILE is a text with an out-of-memory message (a log, with all that is around it), or an HLO
    text; - is standard input. DIR is a folder of XLA's option xla_dump_to, of which the largest
    program is shown. Nothing is compiled.

    Of a dump each cure has the bytes that it gains at least, as far as the places of all buffers
    tell them. A text names no places, so that the gain of a cure is not known there.

    Exit 2 where nothing is known in it.
    """
    outputs.check()
    from nnx_pipeline.lab._report.explanation import cure_remarks, explanation_view
    from nnx_pipeline.lab._report.output import emit_json, show
    from nnx_pipeline.lab._report.view import words
    from nnx_pipeline.lab.explain import explain
    from nnx_pipeline.lab.explain.explanation import MOST_BYTES, explain_text

    if source == "-":
        text = sys.stdin.buffer.read(MOST_BYTES).decode("utf-8-sig", "replace")
        found = explain_text(text, "standard input")
    else:
        found = explain(source)
    if found.program is None and (outputs.html_path or outputs.chart_path):
        raise InputError(
            f"{source} lists no buffers, so that there is no page and no chart; leave out --html "
            "and --chart, or explain an xla_dump_to folder"
        )
    show(explanation_view(found, top=top), json_path=outputs.json_path)
    outputs.say_words(words.BUFFERS, words.MEMORY)
    emit_json(outputs.json_path, found.to_json())
    if found.program:
        outputs.write_measurement(found.source, [found.program], top, cure_remarks(found))
