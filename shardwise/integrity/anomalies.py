"""Detects loss spikes, and finds the module and ranks where non-finite values first appear."""

from collections import deque
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.objects import all_gather_json
from shardwise.console import format_ranks
from shardwise.data.sample_stream import Samples
from shardwise.parallel.engine import Engine
from shardwise.step import backward

WINDOW, MIN_HISTORY = 64, 16  # recent losses to compare with; with fewer than MIN_HISTORY nothing is a spike


class LossSpikeDetector:
    """Detects losses more than `threshold` deviations above the median of recent losses.

    A deviation is 1.4826 times the median absolute deviation, which estimates the standard deviation robustly and is
    equal to it for a normal distribution. It is at least 0.1% of the median.
    """

    def __init__(self, threshold: float):
        self.threshold, self.history = threshold, deque[float](maxlen=WINDOW)

    def evaluate(self, loss: float) -> str:
        """Returns a description if the loss is a spike; otherwise adds it to the history and returns ""."""
        if self.threshold and len(self.history) >= MIN_HISTORY:
            center = median(self.history)
            spread = max(1.4826 * median(abs(value - center) for value in self.history), 1e-3 * abs(center))
            deviations = (loss - center) / spread
            if deviations > self.threshold:
                return f"a loss of {loss:.4g}, {deviations:.0f} deviations above the recent median of {center:.4g}"
        self.history.append(loss)
        return ""


def locate_nonfinite(engine: Engine, samples: Samples) -> str:
    """Replays a step without its update; returns, on every rank, where non-finite values first appear."""
    findings: list[tuple[str, str]] = []
    with ExitStack() as hooks:
        for name, module in (pair for chain in engine.chains for pair in chain.named_modules()):
            if not list(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(_check_output, name, findings)))
        backward(engine, samples)
    if not findings:
        # The backward pass runs from the loss to the first layer, so it reaches the last parameter first.
        bad = [param_shard.name for param_shard in engine.param_shards if not param_shard.grad.isfinite().all()]
        findings = [("the gradient of", name) for name in bad[-1:]]
    engine.data.sync_weights()
    local = (engine.mesh["pipeline"].index, engine.mesh.rank, findings[0] if findings else None)
    gathered = all_gather_json(local)
    return _describe_origin(sorted(gathered, key=lambda entry: entry[:2]))  # in the order of the forward pass


def _check_output(name: str, findings: list[tuple[str, str]], module: nn.Module, inputs: Any, output: Any) -> None:
    if not findings and not _is_finite(output):
        weights = [key for key, weight in module.named_parameters(recurse=False) if not _is_finite(weight)]
        if weights:
            findings.append(("the weight", f"{name}.{weights[0]}"))
        elif _is_finite(inputs):
            findings.append(("the output of", name))


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return all(_is_finite(item) for item in value) if isinstance(value, tuple | list) else True


def _describe_origin(findings: list[tuple[int, int, tuple[str, str] | None]]) -> str:
    """`findings`: stage, rank and finding of every rank."""
    for forward in (True, False):
        matching = [entry for entry in findings if entry[2] and (entry[2][0] != "the gradient of") == forward]
        if matching:
            first = (matching if forward else matching[::-1])[0][2]
            assert first is not None
            ranks = sorted(rank for _, rank, finding in matching if finding == first)
            return f"non-finite values first appear in {' '.join(first)} on {format_ranks(ranks)}"
    return "a replay of the step is finite, so the fault was transient"
