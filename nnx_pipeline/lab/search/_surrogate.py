"""Predicts a figure of programs that were not compiled from those that were."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# Shares of the variance that effects of several kinds together have, and how soon that falls.
_TOGETHER = (0.02, 0.1, 0.3)
_REACHES = (0.5, 0.8)
_NOISE = 1e-6  # of the variance; the figures are exact, and this keeps the matrix well posed


class Predicted(NamedTuple):
    """Mean and standard deviation of a figure, one of each per choice."""

    mean: Float[np.ndarray, "choices"]
    deviation: Float[np.ndarray, "choices"]


@dataclass(frozen=True)
class Surrogate:
    """A Gaussian process over choices, each a row of numbers, one per kind of value.

    - `choices`: those whose figure is known.
    - `figures`: of each of them.

    Its prior is that each kind has an effect of its own, and that effects of several kinds together
    are smaller: choices that agree in all kinds but few have similar figures. What the share of
    these is, the known figures decide by their likelihood.
    """

    choices: Int[np.ndarray, "known kinds"]
    figures: Float[np.ndarray, "known"]

    def predict(self, choices: Int[np.ndarray, "choices kinds"]) -> Predicted:
        """What the figure of these choices is, and how far off that may be."""
        center, scale = float(np.mean(self.figures)), float(np.std(self.figures))
        if scale == 0.0:
            return Predicted(np.full(len(choices), center), np.full(len(choices), 0.0))
        known = (self.figures - center) / scale
        fits = [
            _fit(self.choices, known, together, reach)
            for together in _TOGETHER
            for reach in _REACHES
        ]
        best = max(fits, key=lambda fit: fit.likelihood)
        mean, deviation = best.predict(self.choices, choices)
        return Predicted(center + scale * mean, scale * deviation)


class _Fit(NamedTuple):
    likelihood: float
    variance: float
    together: float
    reach: float
    lower: Float[np.ndarray, "known known"]
    weights: Float[np.ndarray, "known"]

    def predict(
        self, known: Int[np.ndarray, "known kinds"], choices: Int[np.ndarray, "choices kinds"]
    ) -> Predicted:
        cross = _covariance(choices, known, self.together, self.reach)
        explained = np.linalg.solve(self.lower, cross.T)
        left = np.maximum(0.0, 1.0 - np.sum(explained**2, axis=0))
        return Predicted(cross @ self.weights, np.sqrt(self.variance * left))


def _fit(
    choices: Int[np.ndarray, "known kinds"],
    figures: Float[np.ndarray, "known"],
    together: float,
    reach: float,
) -> _Fit:
    number = len(figures)
    matrix = _covariance(choices, choices, together, reach) + _NOISE * np.eye(number)
    lower = np.linalg.cholesky(matrix)
    weights = np.linalg.solve(lower.T, np.linalg.solve(lower, figures))
    variance = float(figures @ weights) / number
    likelihood = -number / 2 * math.log(variance) - float(np.sum(np.log(np.diag(lower))))
    return _Fit(likelihood, variance, together, reach, lower, weights)


def _covariance(
    some: Int[np.ndarray, "some kinds"],
    others: Int[np.ndarray, "others kinds"],
    together: float,
    reach: float,
) -> Float[np.ndarray, "some others"]:
    kinds = some.shape[1]
    equal = np.mean(some[:, None, :] == others[None, :, :], axis=-1)
    differing = kinds * (1.0 - equal)
    result: Float[np.ndarray, "some others"]
    result = (1.0 - together) * equal + together * reach**differing
    return result
