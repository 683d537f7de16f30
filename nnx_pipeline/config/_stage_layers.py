"""How many layers each stage has in each repeat, in integers alone."""

import re
from collections.abc import Sequence

from nnx_pipeline.config._fields import MOST_LAYERS
from nnx_pipeline.lab.errors import InputError, counted, divides, do_not_split

AUTO = "auto"


def numbers_in(stage_layers: str | None) -> tuple[int, ...]:
    """The numbers of a list such as `3,4,4,3`, and none of `auto` or None.

    Raises InputError for another text, and for more layers than a model has at most.
    """
    if stage_layers is None or stage_layers == AUTO:
        return ()
    parts = stage_layers.split(",") if isinstance(stage_layers, str) else []
    numbers = tuple(int(part) for part in parts if re.fullmatch("[0-9]{1,5}", part))
    if not parts or len(numbers) != len(parts) or not 0 < sum(numbers) <= MOST_LAYERS:
        raise InputError(
            f"pipeline.stage_layers={stage_layers!r} is neither auto nor a list of numbers of "
            f"layers, {MOST_LAYERS} at most; write for example 3,4,4,3"
        )
    return numbers


def fits(stage_layers: str | None, stages: int, repeats: int) -> bool:
    """Whether a list has a number for each visit; on one stage those of a repeat are added up."""
    number = len(numbers_in(stage_layers))
    return number in (0, stages * repeats) or (stages == 1 and number % repeats == 0)


def layers_of_visits(
    layers: int, *, stages: int, repeats: int, kinds: int = 1, stage_layers: str | None = None
) -> tuple[int, ...]:
    """The number of layers of each visit, in the order in which a microbatch makes them.

    - `layers`: of the whole pipeline.
    - `kinds`: so many kinds of layers take turns, and each visit begins with the first.
    - `stage_layers`: as in `PipelineConfig`.

    Raises InputError where the layers do not divide, or the list has other numbers.
    """
    visits = stages * repeats
    where = f"{counted(stages, 'stage')} × {counted(repeats, 'repeat')}"
    if stage_layers is None:
        cycle = f" × {kinds} kinds in turn" if kinds > 1 else ""
        divides(
            visits * kinds,
            layers,
            rule=f"{do_not_split(layers, 'layer')} into {where}{cycle}",
            cure="or set pipeline.stage_layers=auto, which leaves "
            f"{counted(-layers % (visits * kinds), 'place')} empty",
        )
        return (layers // visits,) * visits
    numbers = numbers_in(stage_layers)
    if not numbers:
        return _balanced(layers, stages, repeats, kinds)
    if not fits(stage_layers, stages, repeats) or sum(numbers) != layers:
        raise InputError(
            f"pipeline.stage_layers={stage_layers} has {len(numbers)} numbers and "
            f"{counted(sum(numbers), 'layer')}, and the pipeline {where} and "
            f"{counted(layers, 'layer')}; give a number for each stage and repeat, or auto"
        )
    if len(numbers) != visits:
        each = len(numbers) // repeats
        numbers = tuple(sum(numbers[at : at + each]) for at in range(0, len(numbers), each))
    if any(number % kinds for number in numbers[: _last(numbers)]):
        raise InputError(
            f"pipeline.stage_layers={stage_layers}: {kinds} kinds of layers take turns, and a "
            f"stage begins with the first; give multiples of {kinds}, all but the last"
        )
    return numbers


def _balanced(layers: int, stages: int, repeats: int, kinds: int) -> tuple[int, ...]:
    """As few layers as possible on the stage that has most, in each repeat."""
    # A tick takes as long as its longest visit. So all stages get one more layer in the same
    # repeats, the first ones, and what does not divide is missing on the last stages.
    cycles = -(-layers // kinds)
    rows, missing = -(-cycles // stages), -cycles % stages
    deep = [rows // repeats + (repeat < rows % repeats) for repeat in range(repeats)]
    numbers = [kinds * depth for depth in deep for _ in range(stages)]
    last = _last(numbers)
    for visit in range(last - missing + 1, last + 1):
        numbers[visit] -= kinds
    numbers[_last(numbers)] -= cycles * kinds - layers
    return tuple(numbers)


def _last(numbers: Sequence[int]) -> int:
    """The last visit that has layers."""
    return max(visit for visit, number in enumerate(numbers) if number)
