"""A scaling law: the loss of a model of N parameters after D tokens, L(N, D) = E + A / N^alpha + B / D^beta.

The form is that of Hoffmann et al. 2022 (arXiv 2203.15556), where training costs C = 6 N D floating-point operations.
The five constants may be arrays, one entry for each resampled fit: every method then answers for all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = Any
"""A float, or an array of them."""
NAMES = ("E", "A", "B", "alpha", "beta")

# How fast repeated tokens and needless parameters lose their worth, in repetitions: Muennighoff et al. 2023 (arXiv
# 2305.16264), section 5 and appendix A, fitted there to runs of up to 9 billion parameters and 900 billion tokens.
TOKEN_WORTH = 15.387756
PARAMETER_WORTH = 5.309743


@dataclass(frozen=True)
class Law:
    E: Number
    """The loss that no model and no data can get below."""
    A: Number
    B: Number
    alpha: Number
    beta: Number

    def loss(self, N: Number, D: Number) -> Number:
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def optimum(self, flops: Number) -> tuple[Number, Number]:
        """The N and D of the lowest loss that 6 N D = `flops` can buy."""
        both = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        return ratio * (flops / 6) ** (self.beta / both), (flops / 6) ** (self.alpha / both) / ratio

    def tokens_for(self, N: Number, loss: Number) -> Number:
        """The D with which N parameters reach a loss; infinite where they never do."""
        left = np.asarray(loss - self.E - self.A / N**self.alpha, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(left > 0, (self.B / left) ** (1 / self.beta), np.inf)[()]

    def parameters_for(self, D: Number) -> Number:
        """The N for which D tokens are just the right number."""
        both = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        return ratio * (D * ratio) ** (self.beta / self.alpha)

    def worth(self, N: Number, D: Number, unique: float) -> tuple[Number, Number]:
        """The N and D of fresh data that training N on D tokens equals where only `unique` of them differ.

        Each repetition is worth less than the one before, and so are parameters beyond those that the unique tokens
        can use.
        """
        fresh = np.minimum(D, unique)
        useful = np.minimum(N, self.parameters_for(fresh))
        return _worth(useful, N / useful - 1, PARAMETER_WORTH), _worth(fresh, D / fresh - 1, TOKEN_WORTH)

    def repeated_loss(self, N: Number, D: Number, unique: float) -> Number:
        """The loss where only `unique` of the D tokens differ."""
        return self.loss(*self.worth(N, D, unique))

    def as_array(self) -> NDArray[np.float64]:
        return np.array([self.E, self.A, self.B, self.alpha, self.beta])


def _worth(first: Number, repetitions: Number, half: float) -> Number:
    return first + first * half * (1 - np.exp(-repetitions / half))
