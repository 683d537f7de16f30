"""The experiments by name, and the choice among them."""

from collections.abc import Iterable

from nnx_pipeline.errors import InputError, nearest
from nnx_pipeline.experiments.arms import Arm, Experiment
from nnx_pipeline.experiments.claims import CLAIMS

__all__ = ["ELSEWHERE", "EXPERIMENTS", "Arm", "Experiment", "choose"]

EXPERIMENTS = {experiment.name: experiment for experiment in CLAIMS}
# Claims that another command measures: the command, and what the claim is about.
ELSEWHERE = {
    "S2.12": (
        "linen-compat overhead",
        "layers are native NNX, native Linen, NNX wrapped as Linen, or Linen wrapped as NNX; what "
        "that costs in tracing and in memory",
    )
}


def choose(names: Iterable[str]) -> list[Experiment]:
    """The experiments of the given names, each once.

    - `names`: keys of `EXPERIMENTS`. `all` gives all of them, and no name the short set of those
      with `by_default`.

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
