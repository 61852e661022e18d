"""Numbers that go wrong: where they come from, and when a loss is no longer noise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.stream import Samples
from shardwise.parallel.engine import Engine
from shardwise.step import backward
from shardwise.words import ranks_text

WINDOW, ENOUGH = 64, 16  # losses that a new one is compared with; below the second nothing is said


class Spikes:
    """Losses far above those before them: further than `limit` deviations from the median.

    The deviation is 1.4826 times the median distance from the median, which for a normal distribution is its standard
    deviation, and which single losses cannot move; at least a thousandth of the median.
    """

    def __init__(self, limit: float):
        self.limit, self.seen = limit, deque[float](maxlen=WINDOW)

    def judge(self, loss: float) -> str:
        """Words for a loss that is a spike, nothing for one that is not; only those count for later ones."""
        if self.limit and len(self.seen) >= ENOUGH:
            middle = median(self.seen)
            spread = max(1.4826 * median(abs(one - middle) for one in self.seen), 1e-3 * abs(middle))
            far = (loss - middle) / spread
            if far > self.limit:
                return f"a loss of {loss:.4g}, {far:.0f} deviations above {middle:.4g}, the median of the last steps"
        self.seen.append(loss)
        return ""


def trace(engine: Engine, samples: Samples) -> str:
    """Takes a step again, without its update, and names the module and the ranks where numbers first go wrong.

    All ranks call it with the samples of that step, and get the same words.
    """
    found: list[tuple[str, str]] = []
    hooks = []
    for chain in engine.chains:
        for name, module in chain.named_modules():
            if not list(module.children()):
                hooks.append(module.register_forward_hook(_watcher(name, found)))
    try:
        backward(engine, samples)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        # The backward walks from the loss to the first layer, so the last weight is the first that it reaches.
        bad = [holding.name for holding in engine.holdings if not holding.grad.isfinite().all()]
        found = [("the gradient of", name) for name in bad[-1:]]
    engine.data.publish()
    return _sentence(_everyones(engine, found[0] if found else None))


def _watcher(name: str, found: list[tuple[str, str]]) -> Callable[..., None]:
    def watch(module: nn.Module, given: Any, output: Any) -> None:
        if not found and not _finite(output):
            weights = [key for key, weight in module.named_parameters(recurse=False) if not _finite(weight)]
            if weights:
                found.append(("the weight", f"{name}.{weights[0]}"))
            elif _finite(given):
                found.append(("the output of", name))

    return watch


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return all(_finite(one) for one in value) if isinstance(value, tuple | list) else True


def _everyones(engine: Engine, own: tuple[str, str] | None) -> list[tuple[int, int, tuple[str, str] | None]]:
    """Stage, rank and find of every rank, in the order in which a batch passes them."""
    mine = (engine.mesh["pipeline"].index, engine.mesh.rank, own)
    everyone: list[Any] = [mine]
    if engine.mesh["world"].size > 1:
        everyone = [None] * engine.mesh["world"].size
        dist.all_gather_object(everyone, mine)
    return sorted(everyone, key=lambda one: one[:2])


def _sentence(everyone: list[tuple[int, int, tuple[str, str] | None]]) -> str:
    for forward in (True, False):
        finds = [one for one in everyone if one[2] and (one[2][0] != "the gradient of") == forward]
        if finds:
            first = (finds if forward else finds[::-1])[0][2]
            assert first is not None
            ranks = sorted(rank for _, rank, find in finds if find == first)
            return f"it begins in {' '.join(first)} on {ranks_text(ranks)}"
    return "taken again the step is finite, so what was wrong has passed"
