"""Validation: the loss on held-out samples in any layout."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.comm.collectives import Axis, all_reduce
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import Samples, SampleStream, Source, job_stream, rank_positions
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.job import Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import collected_gaps
from shardwise.models.resnet import ClassifierHead
from shardwise.parallel.engine import Engine


def open_validation_sets(job: Job, tokenizer: Path | None) -> dict[str, Source]:
    """Returns the sources of `validation.sets` by name; `tokenizer`: the run's own, if it has one."""
    sources = {}
    for name, one in job.validation.sets.items():
        files = {"source": one.source, "path": one.path} if one.source else {"source": "mix", "mix": {one.path: 1.0}}
        data = job.data.model_copy(update={"path": "", "mix": {}, "validation_fraction": 0.0, "augment": ()} | files)
        try:
            sources[name] = make_sources(job.model_copy(update={"data": data}), own_tokenizer=tokenizer)[0]
        except DataError as error:
            raise DataError(f"validation.sets.{name}: {error}") from None
    return sources


def validate_sets(engine: Engine, job: Job, held_out: Source, sets: Mapping[str, Source],
                  tokenizer: Tokenizer | None) -> dict[str, Any] | None:  # fmt: skip
    """Returns the result for the held-out samples or, with sets, their mean loss by weight and the result for each."""
    result = validate(engine, job, held_out, tokenizer)
    if not sets:
        return result
    results = {name: validate(engine, job, source, tokenizer) or {} for name, source in sets.items()}
    weights = {name: one.weight for name, one in job.validation.sets.items()}
    mean = sum(weight * results[name]["loss"] for name, weight in weights.items()) / sum(weights.values())
    return {"loss": mean, **results, **({} if result is None else {"held_out": result})}


@torch.no_grad()
def validate(engine: Engine, job: Job, source: Source, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    """Returns the mean loss per target over the first `validation.samples` held-out samples; for text also bits per
    byte, for images also the accuracy. None if no samples are held out."""
    if len(source) == 0:
        return None
    data, has_bytes = engine.mesh["data"], job.model.targets_are_text and not job.loss.dpo_beta
    stream = job_stream(job, source, shuffle=False)
    task = job.family.task(job.model)
    metrics = [] if task is None else sorted(task.metrics)
    totals = torch.zeros(5 + len(metrics), dtype=torch.float64)  # loss, targets, bytes, correct, samples; metrics
    heads = [module for chain in engine.chains for module in chain.modules() if isinstance(module, ClassifierHead)]
    torch.nn.ModuleList(engine.chains).eval()
    for samples, weight in _batches(stream, job, data):
        with collected_gaps() as gaps:
            batch_loss = engine.evaluate(samples.to(engine.mesh.device)) * weight
        totals[0] += batch_loss.double().cpu() / engine.mesh["tensor"].size
        measured = [chain.take_metrics() for chain in engine.chains]
        for place, name in enumerate(metrics, start=5):
            totals[place] += sum(values.get(name, 0.0) for values in measured) * weight / engine.mesh["tensor"].size
        if gaps:
            is_pair = (samples.targets != IGNORE_INDEX).any(1)
            totals[3] += int(((torch.cat(gaps) < 0).cpu() & is_pair).sum()) / _copies(engine)
        if engine.is_data_leader:
            counted = samples.targets[samples.targets != IGNORE_INDEX]
            totals[1] += float(engine.num_targets(samples)) * weight
            totals[4] += samples.ids.numel() * weight
            totals[2] += tokenizer.count_bytes(counted.numpy()) if tokenizer is not None and has_bytes else 0
    torch.nn.ModuleList(engine.chains).train()
    for head in heads:
        totals[3] += int(head.num_correct)
        head.num_correct = 0
    totals = totals.to(engine.mesh.device)
    all_reduce(totals, axis=engine.mesh.all_ranks)
    loss, targets, num_bytes, correct, count, *sums = totals.tolist()
    result = {"loss": loss / targets} | {name: value / count for name, value in zip(metrics, sums, strict=True)}
    if heads or job.loss.dpo_beta:
        result["accuracy"] = correct / targets
    if num_bytes:
        result["bits_per_byte"] = loss / math.log(2) / num_bytes
    return result


def _copies(engine: Engine) -> int:
    """Returns how many ranks compute the loss of the same samples."""
    return engine.mesh["tensor"].size * engine.mesh["context"].size


@torch.no_grad()
def score_pairs(engine: Engine, job: Job, source: Any) -> np.ndarray:
    """Returns the log-probability by which the model prefers the chosen answer of each pair of a source."""
    data, count = engine.mesh["data"], len(source)
    scores = torch.zeros(count, dtype=torch.float64)
    stream = job_stream(job, source, shuffle=False)
    torch.nn.ModuleList(engine.chains).eval()
    for number in range(-(-count // job.samples)):
        indices = rank_positions(number, job.samples, data.size, data.index)
        with collected_gaps() as gaps:
            engine.evaluate(stream.read(np.minimum(indices, count - 1)).to(engine.mesh.device))
        if gaps:
            within = indices < count
            scores[indices[within]] = -torch.cat(gaps).double().cpu()[within] / _copies(engine)
    torch.nn.ModuleList(engine.chains).train()
    scores = scores.to(engine.mesh.device)
    all_reduce(scores, axis=engine.mesh.all_ranks)
    return scores.cpu().numpy()


def _batches(stream: SampleStream, job: Job, data: Axis) -> Iterator[tuple[Samples, float]]:
    """Yields this rank's part of each batch, and its weight. A module that is not ours gets whole batches: no sample
    can be left out of its loss. If there are too few samples for one, each rank gets copies of one sample at a time."""
    size, held_out = job.samples // data.size, len(stream.source)
    if not (job.model.passes_batch and (job.model.sample_kind == "batch" or job.model.counts_samples)):
        count = min(job.validation.samples, held_out)
        for number in range(-(-count // job.samples)):
            indices = rank_positions(number, job.samples, data.size, data.index)
            samples, beyond = stream.read(np.minimum(indices, held_out - 1)), torch.from_numpy(indices >= count)
            targets = samples.targets.masked_fill(beyond[:, None], IGNORE_INDEX)  # of those that pad the last batch
            yield replace(samples, targets=targets), 1.0
    elif held_out >= job.samples:
        for number in range(min(max(1, job.validation.samples // job.samples), held_out // job.samples)):
            yield stream.read(rank_positions(number, job.samples, data.size, data.index)), 1.0
    else:
        for index in range(data.index, held_out + data.index, data.size):
            yield stream.read(np.full(size, min(index, held_out - 1))), float(index < held_out) / size
