"""What a step says of tokens and of money."""

from dataclasses import dataclass

HOUR, MILLION, TRILLION = 3600, 10**6, 10**12


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How many tokens a chip works off, and what they cost.

    - `chips`: on which a step runs, some of which are two devices.
    - `tokens`: of a step, on all chips.
    - `seconds`: of a step.
    - `price`: of a chip for an hour, in any currency; None where the user gave none.
    """

    chips: int
    tokens: int
    seconds: float
    price: float | None = None

    @property
    def per_chip_second(self) -> float:
        return self.tokens / self.seconds / self.chips

    def cost_of(self, tokens: int) -> float | None:
        if self.price is None:
            return None
        return self.price / HOUR * tokens / self.per_chip_second

    def to_json(self) -> dict[str, float | None]:
        return {
            "chips": self.chips,
            "tokens_per_step": self.tokens,
            "tokens_per_second_per_chip": self.per_chip_second,
            "price_per_chip_hour": self.price,
            "cost_of_million_tokens": self.cost_of(MILLION),
            "cost_of_trillion_tokens": self.cost_of(TRILLION),
        }
