"""A causal MLP-Mixer as a Shardwise family, in one file: config, network and family.

A block mixes positions instead of attending: each position is a learned combination of itself and the positions before
it (after Tolstikhin et al. 2021, arXiv:2105.01601, with a lower-triangular mixing matrix so that it can predict text).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from shardwise.models.chain import Chain
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family
from shardwise.models.gpt import LMHead
from shardwise.models.layers import Linear, RMSNorm
from shardwise.models.sharding import (
    Colwise,
    InitSpec,
    Rowwise,
    SequenceRegion,
    ShardingPlan,
    VocabEmbedding,
    VocabHead,
)


class MixerConfig(ModelConfig):
    description = "an MLP-Mixer"
    name: str = "mixer"
    layers: int = Field(2, ge=1)
    width: int = Field(64, ge=1)
    hidden: int = Field(128, ge=1)
    """Features between the two linear layers of a block."""
    vocab: int = Field(256, ge=2)
    sequence: int = Field(64, ge=1)

    def _shrunk_values(self) -> dict[str, Any]:
        return {"width": min(self.width, 16), "hidden": min(self.hidden, 24), "sequence": min(self.sequence, 16)}


class MixerEmbedding(nn.Module):
    def __init__(self, config: MixerConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)

    def forward(self, tokens: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.tokens(tokens)


class PositionMixer(nn.Module):
    def __init__(self, config: MixerConfig):
        super().__init__()
        self.up = Linear(config.width, config.hidden, bias=False)
        self.mix = nn.Parameter(torch.empty(config.sequence, config.sequence))
        self.down = Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mix.tril() @ F.gelu(self.up(x)))  # (S, S) @ (B, S, hidden)


class MixerBlock(nn.Module):
    def __init__(self, config: MixerConfig):
        super().__init__()
        self.norm = RMSNorm(config.width, eps=1e-5)
        self.mixer = PositionMixer(config)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return x + self.mixer(self.norm(x))


class MixerHead(nn.Module):
    def __init__(self, config: MixerConfig):
        super().__init__()
        self.norm = RMSNorm(config.width, eps=1e-5)
        self.project = LMHead(config)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.project(self.norm(x), targets)


class MixerFamily(Family):
    config = MixerConfig

    def build(self, config: MixerConfig, seed: int) -> Chain:
        blocks = [(f"block{i}", MixerBlock(config)) for i in range(config.layers)]
        modules = [("embed", MixerEmbedding(config)), *blocks, ("head", MixerHead(config))]
        return Chain(modules, self.sharding_plan(config))

    def sharding_plan(self, config: MixerConfig) -> ShardingPlan:
        return ShardingPlan(
            shard_dims=(
                Colwise("embed.tokens.weight"),
                Colwise("block*.mixer.up.weight"),
                Rowwise("block*.mixer.down.weight"),
                Colwise("head.project.weight"),
            ),
            modules=(
                VocabEmbedding("embed.tokens"),
                SequenceRegion("block*.mixer", rowwise="down"),
                VocabHead("head.project"),
            ),
            ties=(("head.project.weight", "embed.tokens.weight"),),
            init=(("*norm*.weight", InitSpec("ones")), ("*", InitSpec("normal", 0.02))),
            compared_modules=("embed", "block*.mixer", "block*", "head.norm"),
        )
