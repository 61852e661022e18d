"""Modules whose forward is not the same in every call: what one process of PyTorch runs, and so do we."""

from __future__ import annotations

import random

import torch
import user_modules
from torch import Tensor, nn
from user_modules import CLASSES, FEATURES

from shardwise import Task


class Autoencoder(nn.Module):
    """A variational autoencoder: it samples its code from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, 8)
        self.decode = nn.Linear(4, FEATURES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return (self.decode(code) - x).square().mean() + 0.1 * divergence


class DropPath(nn.Module):
    """Leaves out each block for some of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.keep_some(x))
        return self.head(x)

    def keep_some(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.7)


class DropPathInBlocks(DropPath):
    """Draws within the blocks, so that a recomputed block must draw the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(3))

    def keep_some(self, x: Tensor) -> Tensor:
        return x


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rand_like(x))


class LayerDrop(DropPath):
    """Leaves out whole blocks, by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = x + block(x)
        return self.head(x)


class Alternating(nn.Module):
    """Uses one of two layers in every second call, as its own counter says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls % 2 == 0:
            x = self.second(x)
        return self.head(x)


class Curriculum(nn.Module):
    """Uses a second layer from the fifth call on, which is after the calls that analyse it."""

    def __init__(self, first_call: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.calls = 0
        self.first_call = first_call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls >= self.first_call:
            x = self.second(x)
        return self.head(x)


class Fading(Curriculum):
    """Uses its second layer in the first calls only, those that analyse it among them."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls < self.first_call:
            x = self.second(x)
        return self.head(x)


def task(kind: str) -> Task:
    loss = None if kind == "Autoencoder" else nn.CrossEntropyLoss()
    return Task(globals()[kind], loss, user_modules.vectors())
