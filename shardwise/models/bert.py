"""BERT: an encoder trained by masked language modeling (Devlin et al. 2018), written for one device.

Next-sentence prediction is left out, so every token has token type 0. The projection to the vocabulary has no bias."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import gpt, layers
from shardwise.models.bert_family import BertConfig
from shardwise.models.chain import IGNORE_INDEX, Chain
from shardwise.models.sharding import InitSpec, ShardingPlan
from shardwise.random import Dropout


def build_bert(config: BertConfig, seed: int) -> Chain:
    """Returns the chain embed, block0, block1, ..., head."""
    blocks = [(f"block{i}", BertBlock(config, f"block{i}", seed)) for i in range(config.layers)]
    return Chain([("embed", BertEmbedding(config, seed)), *blocks, ("head", BertHead(config))], sharding_plan(config))


def sharding_plan(config: BertConfig) -> ShardingPlan:
    others = ("*", InitSpec("normal", config.init_std))
    return replace(
        gpt.sharding_plan(config),
        init=(("*norm*.weight", InitSpec("ones")), ("*.bias", InitSpec("zeros")), others),
        compared_modules=("embed", "block*.attention", "block*.norm1", "block*.mlp", "block*", "head.norm"),
    )


class BertEmbedding(gpt.DecoderEmbedding):
    def __init__(self, config: BertConfig, seed: int):
        super().__init__(config, seed)
        self.types = nn.Parameter(torch.empty(2, config.width))
        self.norm = gpt.build_norm(config)

    def forward(self, tokens: Tensor, ids: Tensor | None = None, **batch: Tensor | None) -> Tensor:
        x = self.tokens(tokens)
        return self.dropout(self.norm(x + self.positions(x.shape[1]) + self.types[0]), ids)  # type: ignore[misc]


class BertBlock(nn.Module):
    """A post-norm transformer block."""

    def __init__(self, config: BertConfig, name: str, seed: int):
        super().__init__()
        self.attention = gpt.SelfAttention(config, causal=False)
        self.dropout1 = Dropout(config.dropout, f"{name}.1", seed)
        self.norm1 = gpt.build_norm(config)
        self.mlp = gpt.FeedForward(config, approximate="none")
        self.dropout2 = Dropout(config.dropout, f"{name}.2", seed)
        self.norm2 = gpt.build_norm(config)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.dropout1(self.attention(x), ids))
        return self.norm2(x + self.dropout2(self.mlp(x), ids))


class BertHead(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.transform = layers.Linear(config.width, config.width)
        self.norm = gpt.build_norm(config)
        self.project = MaskedLMHead(config)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.project(self.norm(F.gelu(self.transform(x))), targets)


class MaskedLMHead(gpt.LMHead):
    """An LM head that computes only the predicted positions, at most `max_predictions` per sample."""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.max_predictions = config.max_predictions

    def forward(self, x: Tensor, targets: Tensor | None = None, preference: Tensor | None = None) -> Tensor:
        if targets is not None:
            predicted_first = (targets == IGNORE_INDEX).to(torch.int8).argsort(dim=1, stable=True)
            positions = predicted_first[:, : self.max_predictions]
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            targets = targets.gather(1, positions)
        return super().forward(x, targets)
