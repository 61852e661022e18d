"""The single-process reference: a plain training loop that `verify` compares every layout with.

It uses the model, the samples, `torch.optim` and, for what that lacks, plain LAMB and Muon for unsharded weights:
PyTorch has no LAMB, and its Muon computes in bf16, whose rounding would hide the errors that `verify` looks for. The
tables of a DLRM use PyTorch's `embedding_bag` and `SparseAdam`, and row-wise AdaGrad written out. It shares no code
with layouts, parameter shards, embedding tables, `shardwise.step` or our loss, so it cannot share their bugs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.data.criteo import ClickBatch
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.job import Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.moe import MoE
from shardwise.random import hash_key, normal_
from shardwise.verify.kept_state import copy_changed, frozen_weights, persistent_buffers

GradientHook = Callable[[int, Samples], None]  # called with the number of the step, from 0, and its samples


def run_steps(
    job: Job, stream: SampleStream, learning_rates: list[float], record_outputs: Any, dtype: torch.dtype,
    replicas_and_index: tuple[int, int] = (1, 0), make_gradient_hook: Callable[[Any], GradientHook] | None = None,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:  # fmt: skip
    """Yields, per step, a record and the live weights. The record has the loss, the gradient norm, the gradients before
    clipping, the weights after the update, and the frozen weights and buffers, which the forward may have changed.
    `replicas_and_index`: into how many equal parts each batch is split, and which of them to train on.
    `make_gradient_hook`: for tests, returns a function of the model that changes the gradients of each step."""
    model = job.family.build_reference(job.model, job.seed, dtype)
    dense: dict[str, Any] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    tables = make_tables(job, dtype)
    weights = tables | dense
    settings, local_batch_size = job.optimizer, job.samples // replicas_and_index[0]
    optimizers = make_reference_optimizers(job, dense) + make_table_optimizers(job, tables)
    gradient_hook = make_gradient_hook(model) if make_gradient_hook is not None else None
    frozen: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for step_index, lr in enumerate(learning_rates):
        positions = torch.arange(local_batch_size) + step_index * job.samples + replicas_and_index[1] * local_batch_size
        samples = stream.read(positions.numpy())
        outputs: dict[str, list[Tensor]] = {}
        handles = record_outputs(model, outputs)
        document_kwargs = {}
        if job.model.document_separator >= 0:
            ends = (samples.tokens == job.model.document_separator).tolist()
            document_kwargs["document_ids"] = torch.tensor([list(accumulate(row[:-1], initial=0)) for row in ends])
        if job.is_packed:
            rows = [list(accumulate(token < 0 for token in row)) for row in samples.tokens.tolist()]
            document_kwargs["document_ids"] = torch.tensor(rows)
            samples = replace(samples, tokens=samples.tokens.apply_(lambda token: token if token >= 0 else -1 - token))
        loss = None
        if samples.preference is None:
            loss = job.family.reference_loss(job.model, model, samples, **document_kwargs)
        if tables:
            loss = dlrm_loss(job, model, list(tables.values()), samples)
        elif loss is None:
            logits = job.family.reference_logits(job.model, model, samples, **document_kwargs)
            targets = samples.targets[:, -logits.shape[1] :]  # for a T5, the targets of the decoder
            if samples.preference is not None:
                loss = dpo_loss(logits, targets, samples.preference)
            else:
                loss = loss_sum(logits.flatten(0, 1), targets.flatten()) / (targets != IGNORE_INDEX).sum()
        aux_losses: list[Any] = [getattr(module, "aux_loss", None) for module in model.modules()]
        (loss + sum(aux_loss for aux_loss in aux_losses if aux_loss is not None) / local_batch_size).backward()
        for handle in handles:
            handle.remove()
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if gradient_hook is not None:
            gradient_hook(step_index, samples)
        gradients = {name: weight.grad.to_dense().clone() for name, weight in weights.items()}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        if settings.clip and norm > settings.clip:
            for weight in weights.values():
                weight.grad.mul_(settings.clip / norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_multiplier", 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for module in model.modules():
            if isinstance(module, MoE) and module.tokens_per_expert is not None:
                module.update_expert_bias(module.tokens_per_expert)
        updated_weights = {name: weight.detach().clone() for name, weight in weights.items()}
        frozen = copy_changed(frozen_weights(model), frozen)
        buffers = copy_changed(persistent_buffers(model), buffers)
        record = {"loss": loss.detach(), "norm": norm, "outputs": outputs, "gradients": gradients}
        yield record | {"weights": updated_weights, "frozen": frozen, "buffers": buffers}, weights


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def dpo_loss(logits: Tensor, targets: Tensor, preference: Tensor) -> Tensor:
    """Returns the mean of DPO's loss (the paper's equation 7) of pairs. A rejected target t is stored as -101 - t."""
    losses = []
    for log_probs, row, (reference, beta) in zip(logits.log_softmax(-1), targets.tolist(), preference):
        margin = -reference
        for place, target in enumerate(row):
            if target >= 0:
                margin = margin + log_probs[place, target]
            elif target != IGNORE_INDEX:
                margin = margin - log_probs[place, -101 - target]
        losses.append(-F.logsigmoid(beta * margin))
    return torch.stack(losses).mean()


def run_local_sgd_reference(count: int, arguments: Any) -> list[list[dict[str, Any]]]:
    """Returns each replica's step records, synchronized weights included; `arguments` are those of `run_steps`."""
    job, stream, learning_rates, record, dtype = arguments
    runs = [run_steps(job, stream, learning_rates, record, dtype, (count, n)) for n in range(count)]
    records: list[list[dict[str, Any]]] = [[] for _ in runs]
    model = job.family.build_reference(job.model, job.seed, dtype)
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


def make_reference_optimizers(job: Job, weights: dict[str, Any]) -> list[torch.optim.Optimizer]:
    settings, task = job.optimizer, job.family.task(job.model)
    if task is not None and task.optimizer is not None:
        return [task.optimizer(list(weights.values()), lr=settings.lr)]
    default_groups: list[dict[str, Any]] = []
    muon_groups: list[dict[str, Any]] = []
    for name, weight in weights.items():
        decay = settings.weight_decay if weight.dim() > 1 else 0.0
        for pattern, value in reversed(settings.weight_decay_overrides.items()):
            decay = value if fnmatchcase(name, pattern) else decay
        is_in_block = name.startswith(("block", "encoder", "decoder"))
        is_matrix = is_in_block and (weight.dim() == 3 or (weight.dim() == 2 and name.endswith(".weight")))
        target_groups = muon_groups if is_matrix and settings.name == "muon" else default_groups
        target_groups.append({"params": [weight], "weight_decay": decay})
    adam_options: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    if settings.name == "sgd":
        return [torch.optim.SGD(default_groups, momentum=settings.momentum, foreach=False)]
    if settings.name == "adafactor":
        return [torch.optim.Adafactor(default_groups, eps=(2.0**-23, 1e-3), foreach=False)]
    if settings.name == "lamb":
        return [ReferenceLAMB(default_groups, adam_options)]
    adamw = torch.optim.AdamW(default_groups, **adam_options, foreach=False)
    return [adamw, ReferenceMuon(muon_groups, {"momentum": settings.momentum})] if muon_groups else [adamw]


class ReferenceLAMB(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (weight,), (beta1, beta2) = group["params"], group["betas"]
            state = self.state[weight]
            state["t"] = state.get("t", 0) + 1
            m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * weight.grad
            v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * weight.grad**2
            m, v = m / (1 - beta1 ** state["t"]), v / (1 - beta2 ** state["t"])
            update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * weight
            weight_norm, update_norm = float(weight.norm()), float(update.norm())
            trust_ratio = weight_norm / update_norm if weight.dim() > 1 and weight_norm > 0 and update_norm > 0 else 1.0
            weight -= group["lr"] * trust_ratio * update


class ReferenceMuon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (weight,), momentum = group["params"], group["momentum"]
            state = self.state[weight]
            momentum_buffer = state["average"] = momentum * state.get("average", 0.0) + (1 - momentum) * weight.grad
            update = momentum * momentum_buffer + (1 - momentum) * weight.grad
            matrices = [_newton_schulz(matrix) for matrix in (update if update.dim() == 3 else [update])]
            update = torch.stack(matrices).view(weight.shape)
            weight *= 1 - group["lr"] * group["weight_decay"]
            weight -= group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5 * update


def _newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(5):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = -4.7750 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x


def make_tables(job: Job, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the initial embedding tables; none if the model is no DLRM."""
    tables = {}
    for number, table in enumerate(job.family.tables(job.model)):
        weight = torch.empty(table.rows, table.width, dtype=dtype)
        normal_(weight, hash_key("init", job.seed, f"table{number}"), weight.shape, (0, 0), table.init_std)
        tables[f"table{number}"] = weight.requires_grad_()
    return tables


def dlrm_loss(job: Job, dense: nn.Module, tables: list[Tensor], samples: Samples) -> Tensor:
    model: Any = job.model
    batch = ClickBatch.unpack(samples, model)
    pooled = torch.stack([_pool_embeddings(table, batch, number) for number, table in enumerate(tables)], dim=1)
    logits: Tensor = dense(batch.dense_features.to(pooled.dtype), pooled)
    return F.binary_cross_entropy_with_logits(logits, batch.labels.to(pooled.dtype))


def _pool_embeddings(table: Tensor, batch: ClickBatch, number: int) -> Tensor:
    samples = zip(batch.sparse_ids[:, number].tolist(), batch.weights[:, number].tolist())
    pairs = [[(id, weight) for id, weight in zip(*sample) if id >= 0] for sample in samples]
    ids = torch.tensor([id for sample in pairs for id, _ in sample], dtype=torch.int64)
    weights = torch.tensor([weight for sample in pairs for _, weight in sample], dtype=table.dtype)
    offsets = torch.tensor([0, *accumulate(map(len, pairs[:-1]))])
    return F.embedding_bag(ids, table, offsets, mode="sum", sparse=True, per_sample_weights=weights)


def make_table_optimizers(job: Job, tables: dict[str, Any]) -> list[torch.optim.Optimizer]:
    if not tables:
        return []
    group = {"params": list(tables.values()), "lr_multiplier": job.embedding_tables.lr_multiplier}
    if job.embedding_tables.optimizer == "adam":
        return [torch.optim.SparseAdam([group], betas=job.optimizer.betas, eps=job.optimizer.eps)]
    return [RowwiseAdagrad([group], {"eps": job.optimizer.eps})]


class RowwiseAdagrad(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                gradient, state = table.grad.to_dense(), self.state[table]
                state["sum"] = state.get("sum", 0.0) + gradient.square().mean(dim=1)
                table -= group["lr"] * gradient / (state["sum"].sqrt() + group["eps"])[:, None]
