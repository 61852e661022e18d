"""Replicas that train apart, in one process: a plain loop for each, and the meetings written out."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.data.stream import Stream
from shardwise.job import Job
from shardwise.models.chain import reset
from shardwise.models.families import chain_of
from shardwise.verify.truth import walk


def replicas(
    job: Job, count: int, stream: Stream, rates: list[float], watch: Any, dtype: torch.dtype
) -> list[list[dict[str, Any]]]:
    """The records of each replica; weights are those after a meeting."""
    walks = [walk(job, stream, rates, watch, dtype, share=(count, index)) for index in range(count)]
    records: list[list[dict[str, Any]]] = [[] for _ in walks]
    model = chain_of(job.built(), job.seed).to(dtype)
    reset(model, job.seed)
    anchors: dict[str, Any] = {name: weight.detach() for name, weight in model.named_parameters()}
    momenta: dict[str, Any] = {}
    sync = job.sync
    for done in range(1, len(rates) + 1):
        taken = [next(one) for one in walks]
        for name in taken[0][1]:
            digits = "".join(letter for letter in name.split(".")[0] if letter.isdigit())
            part = (int(digits) + 1) % sync.parts if digits else 0
            if done != len(rates) and done % sync.every != part * sync.every // sync.parts:
                continue
            with torch.no_grad():
                mean = sum(weights[name] for _, weights in taken) / count
                if sync.outer:
                    change = anchors[name] - mean
                    momenta[name] = sync.momentum * momenta.get(name, 0.0) + change
                    mean = anchors[name] - sync.rate * (change + sync.momentum * momenta[name])
                    anchors[name] = mean.clone()
                for record, weights in taken:
                    weights[name].copy_(mean)
                    record["weights"][name] = mean.clone()
        for own, (record, _) in zip(records, taken, strict=True):
            own.append(record)
    return records
