"""The loss on held-out samples, in any layout, and what a frequency table would reach on them."""

from __future__ import annotations

import math

import numpy as np
import torch

from shardwise.comm.collectives import all_reduce
from shardwise.data.objectives import objective_of
from shardwise.data.source import Source
from shardwise.data.stream import Samples, Stream, share
from shardwise.data.tokenizer import Tokenizer
from shardwise.job import Job
from shardwise.kinds import T5
from shardwise.models.chain import IGNORED
from shardwise.models.resnet import Head
from shardwise.parallel.engine import Engine


@torch.no_grad()
def validate(engine: Engine, job: Job, source: Source, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    """Mean loss per target over the first `validation.samples` held-out samples; bits per byte where text has bytes,
    the share of images whose class was the likeliest."""
    count = min(job.validation.samples, len(source))
    if count == 0:
        return None
    data, text = engine.mesh["data"], not isinstance(job.model, T5)  # whose targets are marks too
    stream = Stream(source, job.seed, shuffle=False, objective=objective_of(job.model, job.seed))
    sums = torch.zeros(4, dtype=torch.float64)  # loss, targets, bytes, images that were right
    heads = [module for chain in engine.chains for module in chain.modules() if isinstance(module, Head)]
    for chain in engine.chains:
        chain.eval()
    for number in range(-(-count // job.samples)):
        places = share(number, job.samples, data.size, data.index)
        samples = _blank_after(stream.read(np.minimum(places, len(source) - 1)), places, count)
        loss = engine.evaluate(samples.to(engine.mesh.device))
        sums[0] += loss.double().cpu() / engine.mesh["tensor"].size
        if engine.counts_samples:
            counted = samples.targets[samples.targets != IGNORED]
            sums[1] += counted.numel()
            sums[2] += tokenizer.bytes_of(counted.numpy()) if tokenizer is not None and text else 0
    for chain in engine.chains:
        chain.train()
    for head in heads:
        sums[3] += int(head.right)
        head.right = 0
    if engine.mesh.layout.world > 1:
        sums = sums.to(engine.mesh.device)
        all_reduce(sums)
    total, targets, size, right = sums.tolist()
    result = {"loss": total / targets}
    if heads:
        result["accuracy"] = right / targets
    if size:
        result["bits_per_byte"] = total / math.log(2) / size
    return result


def _blank_after(samples: Samples, places: np.ndarray, count: int) -> Samples:
    """The last round may ask for more samples than there are: those do not count."""
    beyond = torch.from_numpy(places >= count)
    return Samples(samples.tokens, samples.targets.masked_fill(beyond[:, None], IGNORED), samples.ids)


def byte_frequency_bits(training: bytes, held_out: bytes) -> float:
    """Bits per byte of a model that knows only how often each byte comes in the training text."""
    seen = np.bincount(np.frombuffer(training, np.uint8), minlength=256) + 1.0
    return float(-np.log2(seen / seen.sum())[np.frombuffer(held_out, np.uint8)].mean())
