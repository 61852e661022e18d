"""The critical batch size of a run, from the noise of its gradients (McCandlish et al. 2018, arXiv 1812.06162).

The squared norm of a gradient of b samples is, in the mean, |G|^2 + S / b: that of the true gradient, and the summed
variance of one sample's gradient. Two batch sizes give both, and S / |G|^2 is the batch (the paper's simple noise
scale) around which larger ones begin to waste tokens. Assumed: plain gradients, as if the optimizer did not rescale
them.

`metrics.jsonl` has the norm for one batch size only. So some more batches are read with the run's last weights: their
gradients are the small ones, and the mean of them all is the large one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream
from shardwise.errors import DataError
from shardwise.models.chain import IGNORE_INDEX
from shardwise.train.generate import load_model
from shardwise.train.local_machine import pick_device
from shardwise.train.run_folder import RunFolder


@dataclass(frozen=True)
class GradientNoiseScale:
    run: str
    samples: float
    """The critical batch."""
    sequence: int
    grad_norm_squared: float
    """|G|^2."""
    variance: float
    """S."""

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run, "critical_batch_samples": self.samples,
                "critical_batch_tokens": self.samples * self.sequence, "gradient_squared": self.grad_norm_squared,
                "variance": self.variance}  # fmt: skip


def solve_noise_scale(
    small_norm: float, large_norm: float, small_batch: float, large_batch: float
) -> tuple[float, float]:
    """|G|^2 and S from the mean squared norms of gradients of `few` and of `many` samples."""
    return (large_batch * large_norm - small_batch * small_norm) / (large_batch - small_batch), (
        small_norm - large_norm
    ) / (1 / small_batch - 1 / large_batch)


def measure_noise_scale(run: Path, batches: int = 16, samples: int = 8) -> GradientNoiseScale:
    """Reads `batches` batches of `samples` samples that follow those the run was trained on."""
    folder = RunFolder.open(run)
    job = folder.job()
    end = job.require_decoder().eod_token_id  # of a decoder: the loss is that of the next token
    device = torch.device(pick_device(job))
    model = load_model(folder, job, device).requires_grad_(True)
    stream = SampleStream(make_sources(job)[0], job.seed)
    first = job.total_steps * job.samples
    mean_gradients: dict[str, torch.Tensor] = {}
    mean_squared_norm = 0.0
    for number in range(batches):
        batch = stream.read(np.arange(first + number * samples, first + (number + 1) * samples)).to(device)
        model.zero_grad()
        logits = model(batch.tokens, **batch.with_document_ids(end).batch).flatten(0, 1)
        F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE_INDEX).backward()
        gradients = {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}
        mean_squared_norm += _squared_norm(gradients) / batches
        mean_gradients = {
            name: mean_gradients.get(name, 0.0) + gradient / batches for name, gradient in gradients.items()
        }
    gradient, variance = solve_noise_scale(mean_squared_norm, _squared_norm(mean_gradients), samples, batches * samples)
    if gradient <= 0 or variance <= 0:
        raise DataError(f"{run}: {batches * samples} samples are too few to tell its gradient from noise; "
                        "give more --batches.")  # fmt: skip
    return GradientNoiseScale(run.name, variance / gradient, job.model.sequence_length, gradient, variance)


def _squared_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(sum(gradient.square().sum() for gradient in gradients.values()))
