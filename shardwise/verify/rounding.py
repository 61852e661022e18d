"""How far rounding alone moves the numbers of the single-process reference.

A layout adds up in another order, so its last bits differ. Most tensors keep their leading digits, but a number that is
the difference of large ones does not: the gradient of a bias before a norm is zero in theory and rounding noise in
practice, and AdamW makes a step of noise. How large noise is depends on the sums that it comes from, which nobody sees
from outside. So it is measured: the reference runs again from weights and inputs whose last bit has moved. What that
moves in the reference itself is no evidence against a layout.

It is measured when a layout differs, so a proof without a difference costs nothing. A model that jumps, because a tie
is broken, is not excused: then nothing is allowed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.verify.kept_state import kept_difference

LAST_BIT = torch.finfo(torch.float64).eps
RUNS = 3  # one alone may round like the reference by chance
# A layout rounds otherwise than a run that is moved: it adds up in parts, and a batch norm over ranks is another
# kernel, whose noise is up to 11 times the measured (tests/alarm_modules.py: small_inputs).
FACTOR = 100.0
JUMP = 1e-6  # relative to the RMS norm of tensors of that kind: more than rounding does
LARGEST_ALLOWANCE = FACTOR * JUMP
"""What a gradient may differ by at most, relative to their RMS norm, whatever is measured: `find_moved` allows nothing
where rounding moves it by more than `JUMP`. A larger difference needs no measurement."""


@dataclass(frozen=True)
class StepRounding:
    """By how much rounding moves the numbers of one step, as absolute norms: by kind, then by name."""

    moved: dict[str, dict[str, float]]

    def allowance(self, kind: str, name: str) -> float:
        """Returns up to which norm a difference is rounding."""
        return FACTOR * self.moved[kind].get(name, 0.0)


class MovedStream:
    """A stream of samples whose inputs are moved by their last bit."""

    def __init__(self, stream: SampleStream, generator: torch.Generator):
        self.stream, self.generator = stream, generator

    def read(self, positions: np.ndarray) -> Samples:
        samples = self.stream.read(positions)
        if samples.inputs is None:
            return samples

        inputs = [move_last_bit(x.double(), self.generator) if x.is_floating_point() else x for x in samples.inputs]
        return replace(samples, inputs=tuple(inputs))


def move_last_bit(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a float64 tensor whose elements are larger or smaller by a rounding. Zeros stay zeros."""
    signs = 2 * torch.randint(0, 2, tensor.shape, generator=generator, dtype=tensor.dtype) - 1
    return tensor * (1 + LAST_BIT * signs)


@torch.no_grad()
def move_weights(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.dtype is torch.float64:
            parameter.copy_(move_last_bit(parameter, generator))


def find_moved(reference: list[dict[str, Any]], runs: list[list[dict[str, Any]]]) -> list[StepRounding] | None:
    """Compares the records of the reference with those of its moved runs. Returns None if the model jumps."""
    found = []
    for number, expected in enumerate(reference):
        steps = [StepRounding(dict(_compare(expected, run[number]))) for run in runs]
        moved = {
            kind: {name: max(step.moved[kind][name] for step in steps) for name in steps[0].moved[kind]}
            for kind in steps[0].moved
        }

        # Noise that an optimizer has made a step of may move later outputs by more, but never a gradient.
        bounded = ["gradients", "outputs"] if number == 0 else ["gradients"]
        for key in bounded:
            norms = [float(tensor.norm()) for tensor in expected[key].values()]
            scale = math.sqrt(sum(norm**2 for norm in norms) / max(1, len(norms)))
            if not all(distance <= JUMP * scale for distance in moved[KINDS[key]].values()):
                return None
        found.append(StepRounding(moved))
    return found


# By key of a record: what a difference in it is called.
KINDS = {"outputs": "output", "loss": "loss", "gradients": "gradient", "norm": "grad_norm", "weights": "weight"}
KEPT_KINDS = {"frozen": "frozen weight", "buffers": "buffer"}


def _compare(expected: dict[str, Any], moved: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for key, kind in KINDS.items():
        if isinstance(expected[key], Tensor):
            yield kind, {kind: float((moved[key] - expected[key]).norm())}
        else:
            yield kind, {name: float((moved[key][name] - value).norm()) for name, value in expected[key].items()}

    for key, kind in KEPT_KINDS.items():
        distances = {name: kept_difference(moved[key][name], value) for name, value in expected[key].items()}
        yield kind, {name: distance if math.isfinite(distance) else 0.0 for name, distance in distances.items()}
