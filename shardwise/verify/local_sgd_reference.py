"""Single-process reference for local SGD: one plain training loop per replica, averaged at each synchronization."""

from typing import Any

import torch

from shardwise.models.chain import init_weights
from shardwise.verify.reference import run_steps


def run_local_sgd_reference(count: int, arguments: Any) -> list[list[dict[str, Any]]]:
    """Returns each replica's step records, synchronized weights included; `arguments` are those of `run_steps`."""
    job, stream, learning_rates, record, dtype = arguments
    runs = [run_steps(job, stream, learning_rates, record, dtype, (1, 1), None, (count, n)) for n in range(count)]
    records: list[list[dict[str, Any]]] = [[] for _ in runs]
    model = job.family.build(job.model, job.seed).to(dtype)
    init_weights(model, job.seed)
    anchors: dict[str, Any] = {name: weight.detach() for name, weight in model.named_parameters()}
    momentum_buffers: dict[str, Any] = {}
    local_sgd = job.local_sgd
    for steps_done in range(1, len(learning_rates) + 1):
        results = [next(run) for run in runs]
        for name in results[0][1]:
            digits = "".join(letter for letter in name.split(".")[0] if letter.isdigit())
            sync_group = (int(digits) + 1) % local_sgd.fragments if digits else 0
            sync_step = sync_group * local_sgd.every // local_sgd.fragments
            if steps_done != len(learning_rates) and steps_done % local_sgd.every != sync_step:
                continue
            with torch.no_grad():
                mean = sum(weights[name] for _, weights in results) / count
                if local_sgd.outer_optimizer:
                    gradient, momentum = anchors[name] - mean, local_sgd.outer_momentum
                    momentum_buffers[name] = momentum * momentum_buffers.get(name, 0.0) + gradient
                    mean = anchors[name] - local_sgd.outer_lr * (gradient + momentum * momentum_buffers[name])
                    anchors[name] = mean.clone()
                for record, weights in results:
                    weights[name].copy_(mean)
                    record["weights"][name] = mean.clone()
        for replica_records, (record, _) in zip(records, results, strict=True):
            replica_records.append(record)
    return records
