"""Estimates the critical batch size of a run from its gradient noise (McCandlish et al. 2018, arXiv 1812.06162).

The expected squared norm of the gradient of b samples is |G|^2 + S / b, where G is the true gradient and S the summed
variance of a single sample's gradient. Measuring it at two batch sizes gives both. S / |G|^2, the paper's simple noise
scale, is the batch size beyond which larger batches start to waste tokens. It ignores how the optimizer rescales
gradients.

`metrics.jsonl` has the gradient norm at one batch size only, so this reads more batches with the run's final weights:
each is a small batch, and their mean is the large one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.data.sample_stream import SampleStream
from shardwise.errors import DataError
from shardwise.models.chain import IGNORE_INDEX
from shardwise.train.generate import load_model
from shardwise.train.local_machine import pick_device
from shardwise.train.run_folder import RunFolder


@dataclass(frozen=True)
class GradientNoiseScale:
    run: str
    critical_batch_samples: float
    critical_batch_tokens: float
    grad_norm_squared: float  # |G|^2
    gradient_variance: float  # S


def solve_noise_scale(
    small_norm: float, large_norm: float, small_batch: float, large_batch: float
) -> tuple[float, float]:
    """Returns |G|^2 and S, given the mean squared gradient norms at a small and a large batch size."""
    grad_norm_squared = (large_batch * large_norm - small_batch * small_norm) / (large_batch - small_batch)
    return grad_norm_squared, (small_norm - large_norm) / (1 / small_batch - 1 / large_batch)


def measure_noise_scale(run: Path, batches: int = 16, samples: int = 8) -> GradientNoiseScale:
    """Measures the noise scale on `batches` batches of `samples` samples that follow the training samples."""
    folder = RunFolder.open(run, weights=True)
    job = folder.job()
    eod_token_id = job.require_decoder().eod_token_id
    device = torch.device(pick_device(job))
    model = load_model(folder, job, device).requires_grad_(True)
    stream = SampleStream(folder.sources(job)[0], job.seed)
    first = job.total_steps * job.samples
    mean_gradients: dict[str, torch.Tensor] = {}
    mean_squared_norm = 0.0
    for number in range(batches):
        batch = stream.read(np.arange(first + number * samples, first + (number + 1) * samples)).to(device)
        model.zero_grad()
        logits = model(batch.tokens, **batch.with_document_ids(eod_token_id).forward_kwargs).flatten(0, 1)
        F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE_INDEX).backward()
        gradients = {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}
        mean_squared_norm += _squared_norm(gradients) / batches
        for name, gradient in gradients.items():
            mean_gradients[name] = mean_gradients.get(name, 0.0) + gradient / batches
    total = batches * samples
    norm_squared, variance = solve_noise_scale(mean_squared_norm, _squared_norm(mean_gradients), samples, total)
    if norm_squared <= 0 or variance <= 0:
        raise DataError(f"{run}: {total} samples are too few to separate gradient from noise; increase --batches.")
    critical = variance / norm_squared
    return GradientNoiseScale(run.name, critical, critical * job.model.sequence_length, norm_squared, variance)


def _squared_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(sum(gradient.square().sum() for gradient in gradients.values()))
