"""What a search varies and within which limit, as users write them."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nnx_pipeline.lab.compile.platform import Platform
from nnx_pipeline.lab.errors import BYTES, MOST, InputError, shown

MOST_VALUES = 10**6
_OVER = re.compile(r"\s*([\w.]+)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*(?::\s*(\d+)\s*)?", re.ASCII)
_LIMIT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(%|[a-zA-Z]+)\s*", re.ASCII)


@dataclass(frozen=True)
class Over:
    """The values of a number: `batch=8..512:8` has 8, 16, … 512."""

    name: str
    values: range

    @classmethod
    def parse(cls, text: str) -> "Over":
        """Raises InputError for another text, and for a range without values."""
        match = _OVER.fullmatch(text)
        if not match:
            raise InputError(
                f"--over {shown(text)} is no range of a number; write batch=1..512, batch=8..512:8 "
                "for multiples of 8, or remat"
            )
        name, *numbers = match.groups()
        if any(len(number or "") > 18 or int(number or 1) > MOST for number in numbers):
            raise InputError(f"--over {shown(text)} has a number above {MOST:,}; give smaller ones")
        low, high, step = int(numbers[0]), int(numbers[1]), int(numbers[2] or 1)
        if step < 1:
            raise InputError(f"--over {text}: the step is {step}; give 1 or more, or leave it out")
        if high < low:
            raise InputError(
                f"--over {text}: the range is empty, as {low} is above {high}; write "
                f"{name}={high}..{low}"
            )
        values = range(low, high + 1, step)
        if len(values) > MOST_VALUES:
            raise InputError(
                f"--over {text} has {len(values):,} values, more than {MOST_VALUES:,}; give a "
                f"step, such as {name}={low}..{high}:{-(-(high - low) // 1000)}"
            )
        return cls(name, values)

    @property
    def unit(self) -> str:
        """What one of it is called: `global_batch` for `train.global_batch`."""
        return self.name.rpartition(".")[2]

    def at(self, value: int) -> str:
        return f"{self.name}={value}"

    def __str__(self) -> str:
        step = f":{self.values.step}" if self.values.step > 1 and len(self.values) > 1 else ""
        return f"{self.name}={self.values[0]}..{self.values[-1]}{step}"

    def in_steps(self, is_usable: Callable[[int], bool]) -> "Over | None":
        """The part of the range that can be used, where that is in equal steps; None where no step
        is seen in what `is_usable` says of the first values that it is asked for, until it stops
        with StopIteration."""
        good = self._usable(is_usable)
        if len(good) < 3 or good == [*self.values]:
            return None
        step = math.gcd(*(b - a for a, b in pairwise(good)))
        if step == self.values.step or good != [*range(good[0], good[-1] + 1, step)]:
            return None
        return Over(self.name, range(good[0], self.values[-1] + 1, step))

    def _usable(self, is_usable: Callable[[int], bool]) -> list[int]:
        good: list[int] = []
        for value in self.values:
            try:
                if is_usable(value):
                    good.append(value)
            except StopIteration:
                break
        return good


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The bytes of one device that a program may hold.

    - `share`: which share of the memory of a device that is; None where the user gave bytes.
    - `device_bytes`: the memory that a program may use of a device; None where it is not known.
    """

    bytes: int
    share: float | None
    device_bytes: int | None

    @classmethod
    def parse(cls, text: str, platform: Platform) -> "MemoryLimit":
        """A limit such as `95%`, of the memory of a device, or `76GB`; raises InputError."""
        capacity = platform.memory_bytes()
        match = _LIMIT.fullmatch(text)
        if not match or not (match[2] == "%" or match[2] in BYTES):
            raise InputError(
                f"--limit {shown(text)} is no limit of memory; write 95% of a device, or 76GB"
            )
        if match[2] != "%":
            given = int(float(match[1]) * BYTES[match[2]])
            if not given:
                raise InputError(f"--limit {text} leaves nothing; give more")
            if capacity is not None and given > capacity:
                raise InputError(
                    f"--limit {text} is more than a program may use of a device of {platform}, "
                    f"{capacity / 1e9:,.2f} GB; give less, or leave it out"
                )
            return cls(bytes=given, share=None, device_bytes=capacity)
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise InputError(f"--limit {text} is no share of a device; write 1% to 100%")
        if capacity is None:
            raise InputError(
                f"--limit {text}: the memory of a device of {platform} is not known; give bytes, "
                "such as --limit 16GB"
            )
        return cls(bytes=int(capacity * share), share=share, device_bytes=capacity)

    @property
    def kept_back(self) -> int | None:
        return None if self.device_bytes is None else self.device_bytes - self.bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "share": self.share,
            "device_memory_bytes": self.device_bytes,
            "kept_back_bytes": self.kept_back,
        }
