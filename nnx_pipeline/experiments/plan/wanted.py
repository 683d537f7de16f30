"""What the options of `plan` ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chips:
    """`--platform`, what else to plan for, `--price`, and `--limit` of a device's memory."""

    platform: str
    others: tuple[str, ...]
    prices: tuple[str, ...]
    limit: str

    @property
    def platforms(self) -> tuple[str, ...]:
        return (self.platform, *self.others)


@dataclass(frozen=True)
class Spending:
    """`--minutes` and `--most`, for each platform."""

    minutes: float
    most: int


@dataclass(frozen=True)
class Written:
    """The files that a plan goes to."""

    json_path: str | None
    html_path: str | None
