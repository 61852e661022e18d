"""The decoder: GPT-2, GPT-3 and Llama shapes from one configuration, written for one device.

Letters in shapes: B samples, S positions, D width, K heads of keys and values, G queries per such head, H features of
a head, F hidden features, V vocabulary.

Queries, keys and values come from one product whose rows lie by head of keys and values: for each of the K, G queries,
then the key, then the value. A rank that holds some of these groups has all it needs to attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kinds import T5, Model, MoE, Named
from shardwise.models.chain import Chain, Cut, Init, Region, Rules, Table, Uneven
from shardwise.models.chain import Head as HeadRule
from shardwise.models.experts import Experts
from shardwise.models.latent import Latent
from shardwise.models.loss import Vocabulary, linear_loss, rows_at_once
from shardwise.models.parts import Product, RMSNorm, attend, rotate, rotation
from shardwise.random import Dropout


def gpt(model: Model, seed: int) -> Chain:
    """The chain embed, block0, block1, ..., head."""
    blocks = [(f"block{i}", Block(model, f"block{i}", seed, sparse(model, i))) for i in range(model.layers)]
    chain = Chain([("embed", Embed(model, seed)), *blocks, ("head", Head(model))], rules(model))
    for module in chain.modules():
        if isinstance(module, Product | Project):
            module.scale = 1.0 / widening(model)
        if isinstance(module, Attention) and model.mup_base_width:
            module.scale = module.head_size**-0.5  # scores are divided by the head's size, not by its root
    return chain


def widening(model: Model) -> float:
    """How many times wider a model is than the one its learning rate was found for (muP, Yang et al. 2022).

    Theirs gives hidden matrices an initial deviation that falls with the root of this, and a learning rate that falls
    with it; logits are divided by it. Adam does not see the scale of a gradient, so the same comes of one learning rate
    for all, hidden products divided by it, and an initial deviation that grows with its root: no optimizer need know.
    """
    return model.width / model.mup_base_width if model.mup_base_width else 1.0


def sparse(model: Model, layer: int) -> bool:
    """Whether a layer has experts."""
    return isinstance(model, MoE) and layer >= model.dense_layers


def prepare(
    chain: Chain, model: Named, device: torch.device, dtype: torch.dtype, *, pipelined: bool, narrow: bool,
    chunk: int, weigh: Callable[[], Tensor],
) -> None:  # fmt: skip
    """Gives a chain whose weights have memory what does not change from step to step: one rotation for all blocks, how
    many positions' logits the loss holds at once (all in a pipeline), whether products are in 8 bits, and what weighs
    the loss that keeps experts in balance."""
    for module in chain.modules():
        if isinstance(module, Experts):
            module.weigh = weigh
            module.forget()
        if isinstance(module, Product | Project):
            module.narrow = narrow
        if isinstance(module, Project):
            module.rows = 0 if pipelined else chunk or module.rows
    found: list[Any] = [module for module in chain.modules() if getattr(module, "theta", None) is not None]
    if found and isinstance(model, Model):
        turned = model.rope_size if isinstance(model, MoE) and model.kv_rank else model.head_size
        cos, sin = rotation(model.sequence, turned, model.rope_theta, device)
        wide = torch.promote_types(dtype, torch.float32)
        turn = cos.to(wide), sin.to(wide)
        for attention in found:
            attention.turn = turn


def rules(model: Model) -> Rules:
    group_rows = (model.heads // model.kv_heads + 2) * model.head_size
    value_rows = model.heads // model.kv_heads * model.head_size
    hidden = model.init_std * math.sqrt(widening(model))
    last = hidden / math.sqrt(2 * model.layers)  # of what a block adds to the stream
    by_query = [_query_rows(model, query) for query in range(model.heads)]
    queries = Uneven("head", tuple(rows for rows, _ in by_query))
    values = Uneven("head", tuple(columns for _, columns in by_query))
    return Rules(
        cuts=(
            Cut("embed.tokens.weight", 0),
            Cut("block*.attention.qkv.*", 0, unit=group_rows, uneven=queries),
            Cut("block*.attention.out.weight", 1, unit=value_rows, uneven=values),
            Cut("block*.attention.q_up.weight", 0, unit=model.head_size + getattr(model, "rope_size", 0)),
            Cut("block*.attention.kv_up.weight", 0, unit=2 * model.head_size),
            Cut("block*.mlp.up.*", 0),
            Cut("block*.mlp.gate.*", 0),
            Cut("block*.mlp.down.weight", 1),
            Cut("head.project.weight", 0),
            Cut("block*.mlp.bank.up", 1),
            Cut("block*.mlp.bank.gate", 1),
            Cut("block*.mlp.bank.down", 2),
            Cut("block*.mlp.shared.up.*", 0),
            Cut("block*.mlp.shared.gate.*", 0),
            Cut("block*.mlp.shared.down.weight", 1),
        ),
        modules=(
            Table("embed.tokens"),
            Region("block*.attention", row="out", uneven=(("group", 1),)),  # each query with a key and value of its own
            Region("block*.mlp", row="down"),
            HeadRule("head.project"),
        ),
        ties=(("head.project.weight", "embed.tokens.weight"),) if model.tied else (),
        init=(
            ("*norm*.weight", Init("ones")),
            ("*.bias", Init("zeros")),
            ("*.attention.out.weight", Init("normal", last)),
            ("*.mlp.down.weight", Init("normal", last)),
            ("*.mlp.shared.down.weight", Init("normal", last)),
            ("*.mlp.bank.down", Init("normal", last)),
            ("embed.*", Init("normal", model.init_std)),
            ("head.*", Init("normal", model.init_std)),
            ("*", Init("normal", hidden)),
        ),
        watched=("embed", "block*.norm1", "block*.attention", "block*.norm2", "block*.mlp", "block*", "head.norm"),
    )


def _query_rows(model: Model, query: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of `qkv` that one query head needs (query, its key, its value), and its columns of `out`."""
    group, size = model.heads // model.kv_heads, model.head_size
    first = query // group * (group + 2)
    heads = (first + query % group, first + group, first + group + 1)
    rows = tuple(head * size + i for head in heads for i in range(size))
    return rows, tuple(range(query * size, (query + 1) * size))


class Embed(nn.Module):
    def __init__(self, model: Model, seed: int):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.positions = Positions(model.sequence, model.width) if model.positions == "learned" else None
        self.dropout = Dropout(model.dropout, "embed", seed)

    def forward(
        self, tokens: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(x.shape[1])
        return self.dropout(x, ids)


class Positions(nn.Module):
    """Learned positions: the rows of `weight` that `places` says, or the first ones."""

    def __init__(self, sequence: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence, width))
        self.places: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        return self.weight[:length] if self.places is None else self.weight[self.places]


class Block(nn.Module):
    def __init__(self, model: Model, name: str, seed: int, sparse: bool = False):
        super().__init__()
        self.norm1 = make_norm(model)
        self.attention = attention(model)
        self.dropout1 = Dropout(model.dropout, f"{name}.1", seed)
        self.norm2 = make_norm(model)
        self.mlp = mixture(model) if sparse and isinstance(model, MoE) else dense(model)
        self.dropout2 = Dropout(model.dropout, f"{name}.2", seed)

    def forward(
        self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        x = x + self.dropout1(self.attention(self.norm1(x), documents), ids)
        return x + self.dropout2(self.mlp(self.norm2(x)), ids)


def attention(model: Model) -> nn.Module:
    if isinstance(model, MoE) and model.kv_rank:
        return Latent(model)
    return Attention(model)


def dense(model: Model) -> nn.Module:
    return SwiGLU(model) if model.activation == "swiglu" else GELU(model)


def mixture(model: MoE) -> nn.Module:
    shared = model.model_copy(update={"ffn": model.shared_ffn, "bias": False}) if model.shared_ffn else None
    return Experts(model, dense(shared) if shared else None)


def make_norm(model: Model) -> nn.Module:
    if model.norm == "rms":
        return RMSNorm(model.width, eps=model.norm_eps)
    return nn.LayerNorm(model.width, eps=model.norm_eps, bias=model.bias)


class Attention(nn.Module):
    """Attention with grouped queries; the number of heads is read off the weights it is given."""

    def __init__(self, model: Model, causal: bool = True):
        super().__init__()
        self.causal = causal
        self.group = model.heads // model.kv_heads
        self.head_size = model.head_size
        self.theta = model.rope_theta if model.positions == "rotary" else None
        self.turn: tuple[Tensor, Tensor] | None = None
        self.scale = 1.0
        self.attend: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor] = attend
        """Another where a rank has only a part of the sequence (`shardwise.parallel.context`)."""
        self.qkv = Product(model.width, (model.heads + 2 * model.kv_heads) * model.head_size, bias=model.bias)
        self.out = Product(model.heads * model.head_size, model.width, bias=model.bias)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_size))  # B S K G+2 H
        q = qkv[..., : self.group, :].flatten(2, 3)  # B S KG H
        k, v = qkv[..., self.group, :], qkv[..., self.group + 1, :]  # B S K H
        if self.theta is not None:
            turn = self.turn or rotation(x.shape[1], self.head_size, self.theta, x.device)
            q, k = rotate(q, turn), rotate(k, turn)
        q = q if self.scale == 1.0 else q * self.scale
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B KG S H, as seen; in memory S comes first
        return self.out(self.attend(q, k, v, self.causal, documents).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.gate = Product(model.width, model.ffn, bias=model.bias)
        self.up = Product(model.width, model.ffn, bias=model.bias)
        self.down = Product(model.ffn, model.width, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    def __init__(self, model: Model, approximate: str = "tanh"):
        super().__init__()
        self.approximate = approximate
        self.up = Product(model.width, model.ffn, bias=model.bias)
        self.down = Product(model.ffn, model.width, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Head(nn.Module):
    """The last norm and the projection to the vocabulary."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm = make_norm(model)
        self.project = Project(model)

    def forward(
        self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        return self.project(self.norm(x), targets)


class Project(nn.Module):
    """Logits, or the loss summed over the targets where they are given."""

    def __init__(self, model: Model | T5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.vocab, model.width))
        self.part: Vocabulary | None = None
        self.rows = rows_at_once(model.vocab)
        """Positions whose logits are held at once; 0: all."""
        self.narrow = False
        self.scale = 1.0

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        if targets is None:
            return F.linear(x, self.weight)
        return linear_loss(x.flatten(0, 1), self.weight, targets.flatten(), self.part, self.rows, self.narrow)


def cost(model: Model) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain, for balancing stages."""
    length, width = model.sequence, model.width
    attend = model.heads * model.head_size
    products = width * (attend + 2 * model.kv_heads * model.head_size) + attend * width
    blocks = []
    for layer in range(model.layers):
        hidden = float(model.ffn)
        if isinstance(model, MoE) and sparse(model, layer):
            hidden = model.experts_per_token * model.expert_ffn + model.shared_ffn
        within = products + width * hidden * (3 if model.activation == "swiglu" else 2)
        blocks.append(2.0 * length * within + 2.0 * length * length * attend)  # half of the square: causal
    # A lookup moves memory and multiplies nothing; it is counted as some operations per number moved.
    return [8.0 * length * width, *blocks, 2.0 * length * width * model.vocab]
