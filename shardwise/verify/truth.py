"""The truth: one process, a plain loop. Imports the model, the samples and torch.optim, nothing else of ours
(but what `torch.optim` lacks, written out beside it).

It knows nothing of layouts, micro-batches, holdings, our step or our loss; what `verify` finds different from it is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.stream import Samples, Stream
from shardwise.job import Job
from shardwise.kinds import Model
from shardwise.models.chain import IGNORED, Chain, reset
from shardwise.models.experts import Experts
from shardwise.models.families import chain_of
from shardwise.models.resnet import classes_of
from shardwise.verify.plain import optimizers_of


def truth(*given: Any) -> list[dict[str, Any]]:
    """One record per step: loss, norm, gradients before clipping, and weights after the update."""
    return [record for record, _ in walk(*given)]


def walk(
    job: Job, stream: Stream, rates: list[float], watch: Any, dtype: torch.dtype,
    ranks: tuple[int, int] = (1, 1), sums: Callable[[Chain], Callable[[str, list[Tensor]], Tensor]] | None = None,
    share: tuple[int, int] = (1, 0),
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:  # fmt: skip
    """Step by step, a record and the weights themselves. `sums` adds up the gradients of a weight that so many ranks
    made, after each of so many parts of their samples, where it is no plain sum. `share`: of so many equal parts of
    each batch, which one is read."""
    model = chain_of(job.built(), job.seed).to(dtype)
    reset(model, job.seed)
    weights: dict[str, Any] = dict(model.named_parameters())
    settings, own = job.optimizer, job.samples // share[0]
    optimizers = optimizers_of(job, weights)
    adder = sums(model) if sums is not None else None
    for number, rate in enumerate(rates):
        places = torch.arange(own) + number * job.samples + share[1] * own
        samples = stream.read(places.numpy())
        seen: dict[str, list[Tensor]] = {}
        handles = watch(model, seen)
        more = {}
        if isinstance(job.model, Model) and job.model.document_end >= 0:
            more["documents"] = torch.tensor([numbered(row, job.model.document_end) for row in samples.tokens.tolist()])
        logits = model(samples.tokens, ids=samples.ids, **more)
        targets = samples.targets[:, -logits.shape[1] :]  # of a T5 those of the decoder
        loss = lost(job, logits.flatten(0, 1), targets.flatten()) / (targets != IGNORED).sum()
        extra: list[Any] = [getattr(module, "extra", None) for module in model.modules()]
        (loss + sum(one for one in extra if one is not None) / own).backward()
        for handle in handles:
            handle.remove()
        if adder is not None and number >= job.gradient.plain_steps(len(rates)):
            apart(job, model, samples, ranks, adder)
        norm = torch.stack([w.grad.square().sum() for w in weights.values()]).sum().sqrt()
        gradients = {name: weight.grad.clone() for name, weight in weights.items()}
        if settings.clip and norm > settings.clip:
            for weight in weights.values():
                weight.grad.mul_(settings.clip / norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, Experts) and module.recent is not None:
                module.rebalance(module.recent)
        after = {name: weight.detach().clone() for name, weight in weights.items()}
        yield {"loss": loss.detach(), "norm": norm, "seen": seen, "gradients": gradients, "weights": after}, weights


def apart(
    job: Job, model: Chain, samples: Samples, ranks: tuple[int, int], adder: Callable[[str, list[Tensor]], Tensor]
) -> None:
    """The gradients again, of each rank's samples by themselves, added up by `adder`."""
    weights, count = dict(model.named_parameters()), (samples.targets != IGNORED).sum()
    shares = [list(share.split(share.ids.numel() // ranks[1])) for share in samples.split(job.samples // ranks[0])]
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    for parts in zip(*shares, strict=True):
        found: list[tuple[Tensor, ...]] = []
        for part in parts:
            logits = model(part.tokens, ids=part.ids)
            targets = part.targets[:, -logits.shape[1] :]
            loss = lost(job, logits.flatten(0, 1), targets.flatten())
            extra: list[Any] = [getattr(module, "extra", None) for module in model.modules()]
            whole = loss / count + sum(one for one in extra if one is not None) / job.samples
            found.append(torch.autograd.grad(whole, list(weights.values())))
        for (name, weight), gradients in zip(weights.items(), zip(*found, strict=True), strict=True):
            assert weight.grad is not None
            weight.grad += adder(name, list(gradients))


def lost(job: Job, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss summed over the targets; that of a blend of two images is the same blend."""
    if "mixup" not in job.data.augment:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    first, second, share = classes_of(targets)
    each = [F.cross_entropy(logits, which, reduction="none") for which in (first, second)]
    return ((1 - share) * each[0] + share * each[1]).sum()


def numbered(row: list[int], end: int) -> list[int]:
    """Of each token, the number of its document."""
    found, document = [], 0
    for token in row:
        found.append(document)
        document += token == end
    return found
