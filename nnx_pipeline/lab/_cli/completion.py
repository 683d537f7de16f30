"""What a shell completes: presets, experiments, platforms, mesh axes and fields of the config."""

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from nnx_pipeline.lab._cli.presets import presets as offered
from nnx_pipeline.lab.compile._gpus import GPUS, targets
from nnx_pipeline.lab.mesh import AXES

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

# A TPU has many topologies; these are the ones that the documents use.
_TPUS = ("tpu:v5p:2x2x2", "tpu:v5p:2x2x2*2", "tpu:v5e:2x4", "tpu:v6e:2x4", "tpu:tpu7x:2x2x1")
PLATFORMS = ("cpu", "local", *_TPUS, *(f"{k}:{name}:8" for k in GPUS for name in targets(k)))


def choice_among(names: Callable[[], Iterable[str]]) -> Complete:
    def complete(
        context: click.Context, parameter: click.Parameter, word: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names() if name.startswith(word)]

    return complete


def axes(context: click.Context, parameter: click.Parameter, word: str) -> list[CompletionItem]:
    """The next axis of a mesh, behind those that the word has already."""
    done, comma, last = word.rpartition(",")
    used = {part.partition("=")[0] for part in done.split(",")}
    return [
        CompletionItem(f"{done}{comma}{axis}=")
        for axis in AXES
        if axis.startswith(last) and axis not in used
    ]


presets = choice_among(lambda: offered().names())
compared = choice_among(lambda: [*offered().names(), *offered().experiments(), "all"])
platforms = choice_among(lambda: PLATFORMS)
fields = choice_among(lambda: [f"{key}=" for key in offered().fields()])
