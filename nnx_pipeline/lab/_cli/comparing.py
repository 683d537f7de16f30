"""What the command `compare` does."""

import functools
from collections.abc import Sequence

from nnx_pipeline.lab._cli.outputs import Outputs
from nnx_pipeline.lab._cli.progress import progress
from nnx_pipeline.lab._cli.subject import Inputs
from nnx_pipeline.lab._cli.support import Failed, compiler_errors
from nnx_pipeline.lab._cli.values import TwoArms
from nnx_pipeline.lab._report import tables as report
from nnx_pipeline.lab._report.view import words
from nnx_pipeline.lab.api import compare
from nnx_pipeline.lab.compile._functions import find_function
from nnx_pipeline.lab.compile.platform import Platform


def run_compare(
    names: tuple[str, str],
    inputs: Inputs,
    target: TwoArms,
    pairs: Sequence[tuple[Platform, Platform]],
    outputs: Outputs,
) -> None:
    """Compares two functions, with each pair of platforms; raises Failed if one fails."""
    with progress() as say, compiler_errors():
        grid, given = inputs.on(target.mesh_config, pairs[0][0])
        one, other = (
            f"{name}, {option}" if option else name
            for name, option in zip(names, target.options, strict=True)
        )
        arms = functools.partial(compare, *map(find_function, names), *given, mesh=grid)
        found = [[arms(platform=pair, labels=(one, other), progress=say)] for pair in pairs]
    title = f"{names[0]} and {names[1]} on {target.mesh_config}, {target.platform}: per device"
    report.show_outcomes(title, found, target.platform, json_path=outputs.json_path)
    outputs.say_words(words.MEMORY, words.TIME, words.VERDICTS, words.BUFFERS)
    outputs.write_outcomes(title, found)
    if failed := [outcome.note for (outcome,) in found if outcome.failed]:
        # Both kinds of matrix products may fail for the same reason, which is then given once.
        raise Failed("; ".join(dict.fromkeys(failed)))
