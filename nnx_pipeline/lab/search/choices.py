"""What can become of the values that a backward pass reads: kept, computed again or offloaded."""

import itertools
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

# `everything`: without any checkpoint, so that values without a name are kept too.
Fate = Literal["recompute", "keep", "offload", "everything"]
Choice = tuple[Fate, ...]  # one of each kind, in their order

_MOST_LISTED, _SOME = 60_000, 20_000


@dataclass(frozen=True)
class Kind:
    """Values for which one thing is chosen: those of one name, or all that a loop stores.

    - `name`: of `checkpoint_name`, or the line of a loop, such as `model.py:12`.
    - `fates`: what can become of them, what needs the least memory first.
    - `is_loop`: whether it is a loop, which is recomputed by a checkpoint around its body.
    """

    name: str
    fates: tuple[Fate, ...] = ("recompute", "keep")
    is_loop: bool = False


def short(line: str) -> str:
    """A line of source without the folder of its file."""
    return os.path.basename(line)


@dataclass(frozen=True)
class Space:
    """All choices for a program.

    - `kinds`: what is chosen for.
    - `has_checkpoint`: whether the program calls `jax.checkpoint` itself. Without, names count
      only where the body of a loop is recomputed.
    """

    kinds: tuple[Kind, ...]
    has_checkpoint: bool = True

    def names(self, choice: Choice, fate: Fate) -> list[str]:
        """The names of values that have this fate; loops are left out."""
        pairs = zip(self.kinds, choice, strict=True)
        return [kind.name for kind, chosen in pairs if chosen == fate and not kind.is_loop]

    def lines(self, choice: Choice, fate: Fate = "recompute") -> list[str]:
        """The lines of loops that have this fate."""
        pairs = zip(self.kinds, choice, strict=True)
        return [kind.name for kind, chosen in pairs if chosen == fate and kind.is_loop]

    @property
    def least(self) -> Choice:
        return tuple(kind.fates[0] for kind in self.kinds)

    @property
    def everything(self) -> Choice:
        fate: Fate = "everything"
        return (fate,) * len(self.kinds)

    def size(self) -> int:
        return math.prod(len(kind.fates) for kind in self.kinds) + 1

    def first(self) -> list[Choice]:
        """What is compiled before anything can be predicted: as much as possible recomputed,
        everything kept, all names kept, all offloaded that can be, and each kind alone kept."""
        kept, away = self._all("keep"), self._all("offload")
        alone = ((*self.least[:at], fate, *self.least[at + 1 :]) for at, fate in enumerate(kept))
        return self._distinct([self.least, self.everything, kept, away, *alone])

    def most_compiles(self) -> int:
        """How many compiles a search makes at most unless it is told."""
        return min(self.size(), len(self.first()) + 8 + len(self.kinds))

    def listed(self, near: Iterable[Choice] = ()) -> list[Choice]:
        """All choices; where they are too many, some, and those that are next to the given ones."""
        if self.size() <= _MOST_LISTED:
            every = itertools.product(*(kind.fates for kind in self.kinds))
            return self._distinct([*every, self.everything])
        chance = random.Random(0)
        some = (tuple(chance.choice(kind.fates) for kind in self.kinds) for _ in range(_SOME))
        around = (
            second
            for choice in near
            for first in self._neighbours(choice)
            for second in (first, *self._neighbours(first))
        )
        return self._distinct([*some, *around])

    def _all(self, fate: Fate) -> Choice:
        return tuple(fate if fate in kind.fates else kind.fates[0] for kind in self.kinds)

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        for at, kind in enumerate(self.kinds):
            for fate in kind.fates:
                if fate != choice[at]:
                    yield (*choice[:at], fate, *choice[at + 1 :])

    def _distinct(self, choices: Sequence[Choice]) -> list[Choice]:
        return [*dict.fromkeys(map(self._canonical, choices))]

    def _canonical(self, choice: Choice) -> Choice:
        """One choice of those that make the same program."""
        reads_names = self.has_checkpoint or self.lines(choice)
        return choice if reads_names else self.everything
