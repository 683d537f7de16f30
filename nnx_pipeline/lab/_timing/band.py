"""How far steps that were measured on chips lay from their estimates.

`measured.toml` has the runs, each with what `benchmarks/time_estimates.py` estimates for the
program here that comes nearest.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Program = Literal["dense", "experts", ""]
FEWEST = 2  # runs of a kind; for fewer all runs count
_WORDS = {"dense": "dense models", "experts": "models with experts"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A measured step and its estimate.

    - `what`: the model and the chips.
    - `chip`: their kind, such as `v5p`.
    - `basis`: by what the step was estimated, as `Time.basis`.
    - `program`: what was trained.
    - `estimated`, `measured`: seconds of a step.
    """

    what: str
    chip: str
    basis: str
    program: Program
    estimated: float
    measured: float

    @property
    def apart(self) -> float:
        """How much longer the measured step was, as a share of its estimate."""
        return self.measured / self.estimated - 1


@dataclass(frozen=True, kw_only=True)
class Band:
    """The least and the most by which the measured steps of a kind were longer than estimated.

    - `kind`: of which programs, on which chips.
    - `runs`: how many were measured.
    """

    kind: str
    runs: int
    least: float
    most: float

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{100 * share:+.0f} %" for share in (self.least, self.most))
        within = " to ".join(ends).replace("-", "−")
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"measured steps of {self.kind} lay {within} from the estimate ({runs})"


@functools.cache
def runs() -> tuple[Run, ...]:
    text = (Path(__file__).parent / "measured.toml").read_text("utf-8")
    return tuple(Run(**entry) for entry in tomllib.loads(text)["run"])


def band_of(basis: str, program: Program, *, but: str = "") -> Band | None:
    """The band of a kind of step; of all that were measured where too few of its kind were.

    `Band.kind` names the models and chips of the runs, which need not be those of the step.

    - `basis`: by what the step is estimated.
    - `program`: what is trained, "" where that is not known.
    - `but`: the name of a run that is left out.

    None where nothing was measured.
    """
    of_basis = [run for run in runs() if run.basis == basis and run.what != but]
    alike = [run for run in of_basis if run.program == program]
    alike = alike if len(alike) >= FEWEST else of_basis
    if not alike:
        return None
    shares = [run.apart for run in alike]
    programs = {_WORDS[run.program] for run in alike}
    models = "all models" if len(programs) > 1 else programs.pop()
    chips = ", ".join(dict.fromkeys(run.chip for run in alike))
    return Band(kind=f"{models} on {chips}", runs=len(alike), least=min(shares), most=max(shares))
