"""Estimates the critical batch size of a run from its gradient noise (McCandlish et al. 2018, arXiv 1812.06162).

    python tools/gradient_noise.py grid/runs/c1e18-n22.6m

The expected squared norm of the gradient of b samples is |G|^2 + S / b, where G is the true gradient and S the summed
variance of a single sample's gradient. Measuring it at two batch sizes gives both. S / |G|^2, the paper's simple noise
scale, is the batch size beyond which larger batches start to waste tokens. It ignores how the optimizer rescales
gradients.

`metrics.jsonl` has the gradient norm at one batch size only, so this reads more batches with the run's final weights:
each is a small batch, and their mean is the large one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.console import format_count
from shardwise.data.sample_stream import SampleStream
from shardwise.errors import DataError
from shardwise.models.chain import IGNORE_INDEX
from shardwise.train.export import open_checkpoint
from shardwise.train.local_machine import pick_device
from shardwise.train.run_folder import RunFolder


def solve_noise_scale(
    small_norm: float, large_norm: float, small_batch: float, large_batch: float
) -> tuple[float, float]:
    """Returns |G|^2 and S, given the mean squared gradient norms at a small and a large batch size."""
    grad_norm_squared = (large_batch * large_norm - small_batch * small_norm) / (large_batch - small_batch)
    return grad_norm_squared, (small_norm - large_norm) / (1 / small_batch - 1 / large_batch)


def measure_noise_scale(run: Path, batches: int = 16, samples: int = 8) -> dict[str, Any]:
    """Measures the noise scale on `batches` batches of `samples` samples that follow the training samples."""
    folder = RunFolder.open(run, weights=True)
    job = folder.job()
    eod_token_id = job.require_decoder().eod_token_id
    device = torch.device(pick_device(job))
    model = open_checkpoint(folder).load(torch.float32).to(device).requires_grad_(True)
    parameters = list(model.parameters())
    stream = SampleStream(folder.sources(job)[0], job.seed)
    first = job.total_steps * job.samples
    mean_gradients = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    mean_squared_norm = 0.0
    for start in range(first, first + batches * samples, samples):
        batch = stream.read(np.arange(start, start + samples)).to(device)
        batch = batch.with_packed_ids() if job.data.pack else batch.with_document_ids(eod_token_id)
        logits = model(batch.tokens, **batch.forward_kwargs).flatten(0, 1)
        loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE_INDEX)
        gradients = [gradient.double() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)]
        mean_squared_norm += _squared_norm(gradients) / batches
        torch._foreach_add_(mean_gradients, gradients, alpha=1 / batches)
    total = batches * samples
    norm_squared, variance = solve_noise_scale(mean_squared_norm, _squared_norm(mean_gradients), samples, total)
    if norm_squared <= 0 or variance <= 0:
        raise DataError(f"{run}: {total} samples are too few to separate gradient from noise; increase --batches.")
    critical = variance / norm_squared
    return {
        "run": run.name, "critical_batch_samples": critical,
        "critical_batch_tokens": critical * job.model.sequence_length,
        "grad_norm_squared": norm_squared, "gradient_variance": variance,  # |G|^2 and S
    }  # fmt: skip


def _squared_norm(gradients: list[torch.Tensor]) -> float:
    return float(sum(gradient.square().sum() for gradient in gradients))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="finished run folders")
    parser.add_argument("--batches", type=int, default=16, help="batches to measure")
    parser.add_argument("--samples", type=int, default=8, help="samples per batch")
    options = parser.parse_args()
    for run in options.runs:
        scale = measure_noise_scale(run, options.batches, options.samples)
        tokens = format_count(scale["critical_batch_tokens"])
        print(f"{run.name}: critical batch size {scale['critical_batch_samples']:.3g} samples, {tokens} tokens")


if __name__ == "__main__":
    main()
