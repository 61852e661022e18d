"""Validation: the loss on held-out samples in any layout."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.comm.collectives import all_reduce
from shardwise.data.input_files import DataRecord
from shardwise.data.make_sources import download_data, make_sources
from shardwise.data.sample_stream import Samples, SampleStream, Source, job_stream, rank_positions
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.job import DataConfig, Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import collected_gaps
from shardwise.models.resnet import ClassifierHead
from shardwise.parallel.engine import Engine
from shardwise.random import generators_kept


def validation_set_names(job: Job) -> list[str]:
    """Returns format and path of each of `validation.sets`: by these, a run's record knows what it has read."""
    return [f"{one.source}:{one.path}" if one.source else one.path for one in job.validation.sets.values()]


def validation_set_data(job: Job) -> dict[str, DataConfig]:
    """Returns the `[data]` section that reads each of `validation.sets`, by name."""
    common = {"path": "", "mix": {}, "validation_fraction": 0.0, "augment": ()}
    sections = {}
    for name, one in job.validation.sets.items():
        files = {"source": one.source, "path": one.path} if one.source else {"source": "mix", "mix": {one.path: 1.0}}
        sections[name] = job.data.model_copy(update=common | files)
    return sections


def refresh_copies(job: Job) -> None:
    """Brings the local copies of all URLs that a job reads, for training and validation, up to date.

    Whoever compares data with the record of a run calls this before, so that what is compared is what will be read. A
    machine may still have copies of an earlier run."""
    download_data(job.data)
    for name, data in validation_set_data(job).items():
        try:
            download_data(data)
        except DataError as error:
            raise DataError(f"validation.sets.{name}: {error}") from None


def open_validation_sets(job: Job, tokenizer: Path | None, record: DataRecord | None = None) -> dict[str, Source]:
    """Returns the sources of `validation.sets` by name. `tokenizer`: the run's own, if it has one; `record`: what the
    run reads, which has chosen these sets (`DataRecord.choose_sets`); None: everything as it is now."""
    if record is None:
        record = DataRecord()
        record.choose_sets(validation_set_names(job))

    sources = {}
    for (name, data), key in zip(validation_set_data(job).items(), validation_set_names(job), strict=True):
        own = record.validation_sets[key]
        try:
            set_job = job.model_copy(update={"data": data})
            sources[name] = make_sources(set_job, record=own, own_tokenizer=tokenizer)[0]
        except DataError as error:
            raise DataError(f"validation.sets.{name}: {error}") from None
    return sources


def validation_changes(before: Job, now: Job) -> str:
    """Returns how a resume changes what is validated; empty if it does not. `--resume` may change it, and losses from
    there on are then not of what those before were of."""
    old, new = before.validation, now.validation
    changes = []
    if old.samples != new.samples:
        changes.append(f"validation.samples = {new.samples!r} instead of {old.samples!r}")
    for name in sorted(old.sets.keys() | new.sets.keys()):
        was, is_now = (None if one is None else one.model_dump() for one in (old.sets.get(name), new.sets.get(name)))
        if was != is_now:
            changes.append(f"validation.sets.{name} = {is_now or 'nothing'} instead of {was or 'nothing'}")
    return ", ".join(changes)


def validation_extent(job: Job, held_out: Source) -> str:
    """Says how many samples of a dataset of the user's own a validation takes, if it does not take all of them."""
    task = job.family.task(job.model)
    count = len(held_out)
    if task is None or task.reads_tokens or job.validation.samples >= count:
        return ""
    is_stream = getattr(held_out, "stream", None) is not None
    dataset = "validation dataset, which is a stream" if is_stream else f"{count:,} of the validation dataset"
    return (
        f"a validation takes {job.validation.samples:,} samples (validation.samples) of the {dataset}; set "
        "validation.samples to take more."
    )


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


def try_metrics(engine: Engine, job: Job, source: Source, tokenizer: Tokenizer | None) -> None:
    """Computes metrics of the user's own once, on the first held-out samples: one that fails ends the run before its
    first step, and not after its last one."""
    task = job.family.task(job.model)
    if task is None or not task.metrics:
        return
    few = job.validation.model_copy(update={"samples": job.samples})
    with generators_kept(engine.mesh.device):
        validate(engine, job.model_copy(update={"validation": few}), source, tokenizer)


@torch.no_grad()
def validate(engine: Engine, job: Job, source: Source, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    """Returns the mean loss per target over the first `validation.samples` held-out samples; for text also bits per
    byte, for images also the accuracy. None if no samples are held out."""
    if len(source) == 0:
        return None
    has_bytes = job.model.targets_are_text and not job.loss.dpo_beta
    stream = job_stream(job, source, shuffle=False)
    task = job.family.task(job.model)
    metrics = [] if task is None else sorted(task.metrics)
    totals = torch.zeros(5 + len(metrics), dtype=torch.float64)  # loss, targets, bytes, correct, samples; metrics
    heads = [module for chain in engine.chains for module in chain.modules() if isinstance(module, ClassifierHead)]
    torch.nn.ModuleList(engine.chains).eval()
    for samples, weight in _batches(stream, job, engine):
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


def _batches(stream: SampleStream, job: Job, engine: Engine) -> Iterator[tuple[Samples, float]]:
    """Yields this rank's part of each batch, and its weight."""
    data, count = engine.mesh["data"], min(job.validation.samples, len(stream.source))
    if not (job.model.passes_batch and (job.model.sample_kind == "batch" or job.model.counts_samples)):
        for number in range(-(-count // job.samples)):
            indices = rank_positions(number, job.samples, data.size, data.index)
            last = len(stream.source) - 1
            samples, beyond = stream.read(np.minimum(indices, last)), torch.from_numpy(indices >= count)
            targets = samples.targets.masked_fill(beyond[:, None], IGNORE_INDEX)  # of those that pad the last batch
            yield replace(samples, targets=targets), 1.0
        return

    # A module that is not ours: no sample can be left out of the loss of its batch. So the last batch is a smaller one.
    for number in range(count // job.samples):
        yield stream.read(rank_positions(number, job.samples, data.size, data.index)), 1.0
    taken = count // job.samples * job.samples
    unit = engine.batch.micro_batch if engine.pipeline is not None else 1  # what stages send each other has one shape
    size = (count - taken) // (data.size * unit) * unit
    if size:
        yield stream.read(np.arange(size) + taken + data.index * size), 1.0
        taken += size * data.size
    # What cannot be shared out among the ranks: each gets copies of one sample, the last ones of a sample for nothing.
    for index in range(taken + data.index, count + data.index, data.size):
        yield stream.read(np.full(unit, min(index, count - 1))), float(index < count) / unit
