"""BERT: an encoder that predicts tokens that were hidden from it (Devlin et al. 2018), written for one device.

Of its two tasks the masked tokens are trained, not the order of two sentences; so all tokens are of the first type, and
the projection to the vocabulary has no bias of its own. Letters in shapes as in `gpt`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kinds import Bert
from shardwise.models import gpt
from shardwise.models.chain import IGNORED, Chain, Init, Rules
from shardwise.random import Dropout


def bert(model: Bert, seed: int) -> Chain:
    """The chain embed, block0, block1, ..., head."""
    blocks = [(f"block{i}", Block(model, f"block{i}", seed)) for i in range(model.layers)]
    return Chain([("embed", Embed(model, seed)), *blocks, ("head", Head(model))], rules(model))


def rules(model: Bert) -> Rules:
    return replace(
        gpt.rules(model),
        init=(
            ("*norm*.weight", Init("ones")),
            ("*.bias", Init("zeros")),
            ("*", Init("normal", model.init_std)),
        ),
        watched=("embed", "block*.attention", "block*.norm1", "block*.mlp", "block*", "head.norm"),
    )


class Embed(nn.Module):
    def __init__(self, model: Bert, seed: int):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.positions = gpt.Positions(model.sequence, model.width)
        self.types = nn.Parameter(torch.empty(2, model.width))
        self.norm = gpt.make_norm(model)
        self.dropout = Dropout(model.dropout, "embed", seed)

    def forward(self, tokens: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        return self.dropout(self.norm(x + self.positions(x.shape[1]) + self.types[0]), ids)


class Block(nn.Module):
    """Norms come after the sums."""

    def __init__(self, model: Bert, name: str, seed: int):
        super().__init__()
        self.attention = gpt.Attention(model, causal=False)
        self.dropout1 = Dropout(model.dropout, f"{name}.1", seed)
        self.norm1 = gpt.make_norm(model)
        self.mlp = gpt.GELU(model, approximate="none")
        self.dropout2 = Dropout(model.dropout, f"{name}.2", seed)
        self.norm2 = gpt.make_norm(model)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.dropout1(self.attention(x), ids))
        return self.norm2(x + self.dropout2(self.mlp(x), ids))


class Head(nn.Module):
    def __init__(self, model: Bert):
        super().__init__()
        self.transform = gpt.Product(model.width, model.width)
        self.norm = gpt.make_norm(model)
        self.project = Project(model)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.project(self.norm(F.gelu(self.transform(x))), targets)


class Project(gpt.Project):
    """Only positions that are predicted become logits; there are at most `predicted` of them in a sample."""

    def __init__(self, model: Bert):
        super().__init__(model)
        self.predicted = model.predicted

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is not None:
            first = (targets == IGNORED).to(torch.int8).argsort(dim=1, stable=True)[:, : self.predicted]
            x = x.gather(1, first.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            targets = targets.gather(1, first)
        return super().forward(x, targets)


def cost(model: Bert) -> list[float]:
    """As `gpt.cost`: attention sees the whole square, the head only what is predicted."""
    embed, *blocks, _ = gpt.cost(model)
    more = 2.0 * model.sequence**2 * model.heads * model.head_size
    head = 2.0 * model.width * (model.sequence * model.width + model.predicted * model.vocab)
    return [embed, *(block + more for block in blocks), head]
