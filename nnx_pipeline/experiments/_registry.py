"""The experiments by name, and the choice among them."""

from collections.abc import Iterable

from nnx_pipeline.experiments._arms import Arm, Experiment
from nnx_pipeline.experiments._claim_table import ELSEWHERE
from nnx_pipeline.experiments._claims import EXPERIMENTS
from nnx_pipeline.lab.errors import InputError, nearest

__all__ = ["ELSEWHERE", "EXPERIMENTS", "Arm", "Experiment", "choose"]


def choose(names: Iterable[str]) -> list[Experiment]:
    """The experiments of the given names, each once.

    - `names`: keys of `EXPERIMENTS`; `all` for all experiments, no name for the short set
      (`by_default`).

    Raises InputError, which names the nearest known name, for a name that is not known.
    """
    names = list(names)
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            raise InputError(
                f"experiment {name!r} is not known; {nearest(name, [*EXPERIMENTS, 'all'])}"
            )
    if "all" in names:
        return list(EXPERIMENTS.values())
    if names:
        return [EXPERIMENTS[name] for name in dict.fromkeys(names)]
    return [experiment for experiment in EXPERIMENTS.values() if experiment.by_default]
