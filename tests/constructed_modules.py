"""Modules whose constructors draw random numbers, or read and copy the values of parameters."""

from __future__ import annotations

import functools
import random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from user_modules import CLASSES, FEATURES, vectors

from shardwise.adapters.task import Task


class Trunk(nn.Module):
    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.blocks = nn.Sequential(block(), block())
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class RandomBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("frequencies", torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.linear(x) @ self.frequencies)


class RandomOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.order = torch.randperm(FEATURES)
        self.numpy_order = np.random.permutation(FEATURES).tolist()
        self.python_order = random.sample(range(FEATURES), FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x[:, self.order])[:, self.numpy_order] * x[:, self.python_order]


class NumpyValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.tensor([random.random() for _ in range(FEATURES)]))
        with torch.no_grad():
            self.linear.weight.copy_(torch.from_numpy(0.1 * np.random.randn(FEATURES, FEATURES)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.linear(x)


class KeptValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.mean = self.linear.weight.detach().abs().mean().item()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mean * self.linear(x)


class KeepsNormsInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)

    def train(self, mode: bool = True) -> KeepsNormsInEvaluation:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class HookedGradient(nn.Module):
    """The hook keeps the upper triangle of a weight as it is, and the other halves the gradient of the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.linear.weight.register_hook(torch.tril)
        self.linear.bias.register_post_accumulate_grad_hook(halve_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.5


class UpdatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.linear.weight.register_post_accumulate_grad_hook(update)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def update(parameter: Tensor) -> None:
    parameter.sub_(parameter.grad)


class CopiesOfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("teacher", self.linear.weight.detach().clone())
        self.register_buffer("filled", torch.zeros(FEATURES, FEATURES))
        self.filled.copy_(2 * self.linear.weight.detach())
        self.register_buffer("noise", torch.randn_like(self.linear.weight.detach()))
        self.norms = self.linear.weight.detach().norm(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.norms + x @ (self.teacher - self.filled + self.noise)


class Spectral(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)))


class OldSpectral(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(spectral_norm(nn.Linear(FEATURES, FEATURES)))


class Orthogonal(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)))


class Pruned(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(prune.l1_unstructured(nn.Linear(FEATURES, FEATURES), "weight", amount=0.5))


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("alias", self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.alias


@functools.lru_cache
def bounded_table(length: int) -> Tensor:
    return torch.sin(torch.arange(length) * 0.3)


@functools.cache
def unbounded_table(length: int) -> tuple[Tensor, ...]:
    return (torch.cos(torch.arange(length) * 0.3),)


LAST_TABLE: Tensor | None = None


class CachedTables(nn.Module):
    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        global LAST_TABLE
        length = x.shape[-1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length) / length
        if self.mask is None:
            self.mask = torch.ones(length, length).tril()
        if LAST_TABLE is None:
            LAST_TABLE = torch.arange(length) + 1
        scale = bounded_table(length) + unbounded_table(length)[0] + self.tables[length] / LAST_TABLE
        return x + self.linear(x) * scale @ self.mask.to(x.dtype)


class Compiled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.jit.script(nn.Linear(FEATURES, FEATURES)))


BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (
        RandomBuffer,
        RandomOrder,
        NumpyValues,
        KeptValue,
        KeepsNormsInEvaluation,
        HookedGradient,
        UpdatesItself,
        CopiesOfWeights,
        Spectral,
        OldSpectral,
        Orthogonal,
        Pruned,
        CachedTables,
    )
}


def task(kind: str) -> Task:
    return Task(lambda: Trunk(BLOCKS[kind]), loss=nn.CrossEntropyLoss(), data=vectors(), validation=vectors())


def task_of_instance(kind: str) -> Task:
    return Task(Trunk(BLOCKS[kind]), loss=nn.CrossEntropyLoss(), data=vectors())
