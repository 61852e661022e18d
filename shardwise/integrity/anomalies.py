"""Numbers that go wrong: where they come from, and when a loss is no longer noise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.console import format_ranks
from shardwise.data.sample_stream import Samples
from shardwise.parallel.engine import Engine
from shardwise.step import backward

WINDOW, MIN_HISTORY = 64, 16  # losses that a new one is compared with; below the second nothing is said


class LossSpikeDetector:
    """Losses far above those before them: further than `limit` deviations from the median.

    The deviation is 1.4826 times the median distance from the median, which for a normal distribution is its standard
    deviation, and which single losses cannot move; at least a thousandth of the median.
    """

    def __init__(self, threshold: float):
        self.threshold, self.history = threshold, deque[float](maxlen=WINDOW)

    def evaluate(self, loss: float) -> str:
        """Words for a loss that is a spike, nothing for one that is not; only those count for later ones."""
        if self.threshold and len(self.history) >= MIN_HISTORY:
            center = median(self.history)
            spread = max(1.4826 * median(abs(one - center) for one in self.history), 1e-3 * abs(center))
            deviations = (loss - center) / spread
            if deviations > self.threshold:
                return f"a loss of {loss:.4g}, {deviations:.0f} deviations above {center:.4g}, the median of the last steps"
        self.history.append(loss)
        return ""


def locate_nonfinite(engine: Engine, samples: Samples) -> str:
    """Takes a step again, without its update, and names the module and the ranks where numbers first go wrong.

    All ranks call it with the samples of that step, and get the same words.
    """
    found: list[tuple[str, str]] = []
    hooks = []
    for chain in engine.chains:
        for name, module in chain.named_modules():
            if not list(module.children()):
                hooks.append(module.register_forward_hook(_make_hook(name, found)))
    try:
        backward(engine, samples)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        # The backward walks from the loss to the first layer, so the last weight is the first that it reaches.
        bad = [param_shard.name for param_shard in engine.param_shards if not param_shard.grad.isfinite().all()]
        found = [("the gradient of", name) for name in bad[-1:]]
    engine.data.sync_weights()
    return _describe_origin(_gather_findings(engine, found[0] if found else None))


def _make_hook(name: str, found: list[tuple[str, str]]) -> Callable[..., None]:
    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _is_finite(output):
            weights = [key for key, weight in module.named_parameters(recurse=False) if not _is_finite(weight)]
            if weights:
                found.append(("the weight", f"{name}.{weights[0]}"))
            elif _is_finite(inputs):
                found.append(("the output of", name))

    return watch


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return all(_is_finite(one) for one in value) if isinstance(value, tuple | list) else True


def _gather_findings(engine: Engine, finding: tuple[str, str] | None) -> list[tuple[int, int, tuple[str, str] | None]]:
    """Stage, rank and find of every rank, in the order in which a batch passes them."""
    mine = (engine.mesh["pipeline"].index, engine.mesh.rank, finding)
    findings: list[Any] = [mine]
    if engine.mesh["world"].size > 1:
        findings = [None] * engine.mesh["world"].size
        dist.all_gather_object(findings, mine)
    return sorted(findings, key=lambda one: one[:2])


def _describe_origin(findings: list[tuple[int, int, tuple[str, str] | None]]) -> str:
    for forward in (True, False):
        matching = [one for one in findings if one[2] and (one[2][0] != "the gradient of") == forward]
        if matching:
            first = (matching if forward else matching[::-1])[0][2]
            assert first is not None
            ranks = sorted(rank for _, rank, finding in matching if finding == first)
            return f"it begins in {' '.join(first)} on {format_ranks(ranks)}"
    return "taken again the step is finite, so what was wrong has passed"
