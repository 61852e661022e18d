"""The scaling law L(N, D) = E + A / N^alpha + B / D^beta: the loss of N parameters trained on D tokens.

The form is that of Hoffmann et al. 2022 (arXiv 2203.15556), where training costs C = 6 N D FLOPs. The five constants
may be arrays with one entry per bootstrap fit; every method then returns arrays.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatOrArray = Any  # a float or an array of floats
CONSTANTS = ("E", "A", "B", "alpha", "beta")
MAX_FLOPS = 1e32  # of a budget: a million times the largest runs

# Decay constants, in repetitions, of the value of repeated tokens and excess parameters: Muennighoff et al. 2023 (arXiv
# 2305.16264), section 5 and appendix A, fitted to runs of up to 9 billion parameters and 900 billion tokens.
REPEATED_TOKEN_DECAY = 15.387756
EXCESS_PARAMETER_DECAY = 5.309743


@dataclass(frozen=True)
class ScalingLaw:
    E: FloatOrArray  # irreducible loss
    A: FloatOrArray
    B: FloatOrArray
    alpha: FloatOrArray
    beta: FloatOrArray

    def loss(self, N: FloatOrArray, D: FloatOrArray) -> FloatOrArray:
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def compute_optimal(self, flops: FloatOrArray) -> tuple[FloatOrArray, FloatOrArray]:
        """Returns the N and D with the lowest loss for 6 N D = `flops`."""
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponent_sum)
        return ratio * (flops / 6) ** (self.beta / exponent_sum), (flops / 6) ** (self.alpha / exponent_sum) / ratio

    def tokens_to_reach(self, N: FloatOrArray, loss: FloatOrArray) -> FloatOrArray:
        """Returns the D at which N parameters reach a loss; infinite if they never do."""
        reducible = np.asarray(loss - self.E - self.A / N**self.alpha, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(reducible > 0, (self.B / reducible) ** (1 / self.beta), np.inf)[()]

    def optimal_parameters(self, D: FloatOrArray) -> FloatOrArray:
        """Returns the N for which D tokens are compute-optimal."""
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponent_sum)
        return ratio * (D * ratio) ** (self.beta / self.alpha)

    def effective_parameters_and_tokens(
        self, N: FloatOrArray, D: FloatOrArray, unique_tokens: float
    ) -> tuple[FloatOrArray, FloatOrArray]:
        """Returns the N and D that would reach the same loss if all tokens were unique: repeated tokens are worth less,
        and so are parameters beyond those that are compute-optimal for the unique tokens."""
        distinct_tokens = np.minimum(D, unique_tokens)
        useful_parameters = np.minimum(N, self.optimal_parameters(distinct_tokens))
        parameters = _effective_amount(useful_parameters, N / useful_parameters - 1, EXCESS_PARAMETER_DECAY)
        return parameters, _effective_amount(distinct_tokens, D / distinct_tokens - 1, REPEATED_TOKEN_DECAY)

    def data_constrained_loss(self, N: FloatOrArray, D: FloatOrArray, unique_tokens: float) -> FloatOrArray:
        """Returns the loss if only `unique_tokens` of the D tokens are unique."""
        return self.loss(*self.effective_parameters_and_tokens(N, D, unique_tokens))

    def as_array(self) -> NDArray[np.float64]:
        return np.array([self.E, self.A, self.B, self.alpha, self.beta])


def _effective_amount(amount: FloatOrArray, repetitions: FloatOrArray, decay: float) -> FloatOrArray:
    return amount + amount * decay * (1 - np.exp(-repetitions / decay))
