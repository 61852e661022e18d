"""T5: an encoder and a decoder that also attends to what the encoder gave (Raffel et al. 2020), written for one device.

Encoder and decoder lie one behind the other along the sequence: the stream is (B, S + T, D), S positions of the encoder
and T of the decoder. Blocks of either side work on theirs and add nothing to the other, so the model is a chain like
any other: a stage of a pipeline hands on one tensor, and sequence parallelism cuts one length.

Positions are told by a number for each head and distance, added to the scores. Each block has its own table of them (as
in UMT5; the first T5 shares one between all blocks of a side, which would tie every stage of a pipeline to the first).
Scores are not divided by the root of the head's size, norms have no mean, products no bias.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kinds import T5
from shardwise.models import gpt, parts
from shardwise.models.chain import Chain, Cut, Init, Region, Rules, Table
from shardwise.models.chain import Head as HeadRule
from shardwise.random import Dropout


def t5(model: T5, seed: int) -> Chain:
    """The chain embed, encoder0, ..., bridge, decoder0, ..., head."""
    pieces: list[tuple[str, nn.Module]] = [("embed", Embed(model, seed))]
    pieces += [(f"encoder{i}", Encoder(model, f"encoder{i}", seed)) for i in range(model.layers)]
    pieces += [("bridge", Bridge(model, seed))]
    pieces += [(f"decoder{i}", Decoder(model, f"decoder{i}", seed)) for i in range(model.layers)]
    return Chain([*pieces, ("head", Head(model))], rules(model))


def rules(model: T5) -> Rules:
    attended = model.heads * model.head_size
    head = 1.0 if model.tied else model.width**-0.5
    attentions = ("*coder*.attention", "decoder*.cross")
    return Rules(
        cuts=(
            Cut("embed.tokens.weight", 0),
            *(Cut(f"{name}.{part}.weight", 0, unit=model.head_size) for name in attentions for part in "qkv"),
            *(Cut(f"{name}.out.weight", 1, unit=model.head_size) for name in attentions),
            Cut("*.attention.distances", 1),
            Cut("*.mlp.up.weight", 0),
            Cut("*.mlp.gate.weight", 0),
            Cut("*.mlp.down.weight", 1),
            Cut("head.project.weight", 0),
        ),
        modules=(
            Table("embed.tokens"),
            Region("*coder*.attention", row="out"),
            Region("decoder*.cross", row="out"),
            Region("*coder*.mlp", row="down"),
            HeadRule("head.project"),
        ),
        ties=(("head.project.weight", "embed.tokens.weight"),) if model.tied else (),
        init=(
            ("*norm*.weight", Init("ones")),
            ("embed.tokens.weight", Init("normal", 1.0)),
            ("*.q.weight", Init("normal", (model.width * model.head_size) ** -0.5)),
            ("*.out.weight", Init("normal", attended**-0.5)),
            ("*.down.weight", Init("normal", model.ffn**-0.5)),
            ("head.project.weight", Init("normal", head)),
            ("*", Init("normal", model.width**-0.5)),
        ),
        block="*coder*",
        watched=("embed", "encoder*.attention", "encoder*.mlp", "encoder*", "bridge", "decoder*.attention",
                 "decoder*.norm2", "decoder*.cross", "decoder*.mlp", "decoder*", "head.norm"),
    )  # fmt: skip


class Embed(nn.Module):
    def __init__(self, model: T5, seed: int):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.width)
        self.dropout = Dropout(model.dropout, "embed", seed)

    def forward(self, tokens: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.dropout(self.tokens(tokens), ids)


class Side(nn.Module):
    """A norm of one side of the stream; the other passes."""

    def __init__(self, model: T5, decoder: bool):
        super().__init__()
        self.norm = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.border, self.decoder = model.sequence, decoder
        self.places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device) if self.places is None else self.places
        return torch.where(((places >= self.border) == self.decoder)[:, None], self.norm(x), x)


class Encoder(nn.Module):
    def __init__(self, model: T5, name: str, seed: int):
        super().__init__()
        self.norm1 = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.attention = Attention(model, "encoder")
        self.dropout1 = Dropout(model.dropout, f"{name}.1", seed)
        self.norm2 = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.mlp = MLP(model, slice(0, model.sequence))
        self.dropout2 = Dropout(model.dropout, f"{name}.2", seed)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)), ids)
        return x + self.dropout2(self.mlp(self.norm2(x)), ids)


class Bridge(nn.Module):
    """The encoder's last norm."""

    def __init__(self, model: T5, seed: int):
        super().__init__()
        self.norm = Side(model, decoder=False)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, model: T5, name: str, seed: int):
        super().__init__()
        self.norm1 = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.attention = Attention(model, "decoder")
        self.dropout1 = Dropout(model.dropout, f"{name}.1", seed)
        self.norm2 = Side(model, decoder=True)  # keys and values are what the encoder gave
        self.cross = Attention(model, "cross")
        self.dropout2 = Dropout(model.dropout, f"{name}.2", seed)
        self.norm3 = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.mlp = MLP(model, slice(model.sequence, model.length))
        self.dropout3 = Dropout(model.dropout, f"{name}.3", seed)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)), ids)
        x = x + self.dropout2(self.cross(self.norm2(x)), ids)
        return x + self.dropout3(self.mlp(self.norm3(x)), ids)


class Attention(nn.Module):
    """Of the encoder to itself, of the decoder to what it has written (causal), or of the decoder to the encoder."""

    def __init__(self, model: T5, kind: str):
        super().__init__()
        attended = model.heads * model.head_size
        self.q = parts.Product(model.width, attended, bias=False)
        self.k = parts.Product(model.width, attended, bias=False)
        self.v = parts.Product(model.width, attended, bias=False)
        self.out = parts.Product(attended, model.width, bias=False)
        self.distances = nn.Parameter(torch.empty(model.buckets, model.heads)) if kind != "cross" else None
        self.size, self.farthest, self.causal = model.head_size, model.farthest, kind == "decoder"
        encoder, decoder = slice(0, model.sequence), slice(model.sequence, model.length)
        self.asks = encoder if kind == "encoder" else decoder
        self.answers = decoder if kind == "decoder" else encoder

    def forward(self, x: Tensor) -> Tensor:
        own, other = x[:, self.asks], x[:, self.answers]
        q, k, v = (
            product(part).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for product, part in ((self.q, own), (self.k, other), (self.v, other))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(own.shape[1], q.dtype), scale=1.0)
        return _alone(self.out(y.transpose(1, 2).flatten(2)), self.asks, x.shape[1])

    def _bias(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """(heads, queries, keys); of keys behind a decoder's query minus infinity."""
        if self.distances is None:
            return None
        places = torch.arange(length, device=self.distances.device)
        ahead = places - places[:, None]  # of the key
        bias = self.distances[bucket(ahead, not self.causal, self.distances.shape[0], self.farthest)].permute(2, 0, 1)
        return (bias.masked_fill(ahead > 0, -math.inf) if self.causal else bias).to(dtype)


def bucket(ahead: Tensor, both: bool, buckets: int, farthest: int) -> Tensor:
    """Groups of distances: half of them one by one, the others ever wider, up to `farthest`; with `both`, half of all
    for keys ahead and half for those behind."""
    first = torch.zeros_like(ahead)
    if both:
        buckets //= 2
        first = torch.where(ahead > 0, buckets, 0)
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    # In float64: at a border the logarithm must fall to the same side everywhere.
    share = (distance.clamp(min=1).double() / exact).log() / math.log(farthest / exact)
    wide = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, wide)


class MLP(nn.Module):
    def __init__(self, model: T5, part: slice):
        super().__init__()
        self.gate = parts.Product(model.width, model.ffn, bias=False) if model.activation == "geglu" else None
        self.up = parts.Product(model.width, model.ffn, bias=False)
        self.down = parts.Product(model.ffn, model.width, bias=False)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        own = x[:, self.part]
        hidden = self.up(own)
        hidden = hidden.relu() if self.gate is None else F.gelu(self.gate(own), approximate="tanh") * hidden
        return _alone(self.down(hidden), self.part, x.shape[1])


def _alone(y: Tensor, part: slice, length: int) -> Tensor:
    """One side's positions, and nothing at the other's."""
    return F.pad(y, (0, 0, part.start, length - part.stop))


class Head(nn.Module):
    def __init__(self, model: T5):
        super().__init__()
        self.norm = parts.RMSNorm(model.width, eps=model.norm_eps)
        self.project = Project(model)

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        return self.project(self.norm(x), targets)  # type: ignore[no-any-return]


class Project(gpt.Project):
    """Only the decoder's positions become logits."""

    def __init__(self, model: T5):
        super().__init__(model)
        self.border, self.scale = model.sequence, model.width**-0.5 if model.tied else 1.0

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x[:, self.border :], None if targets is None else targets[:, self.border :])


def cost(model: T5) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain, for balancing stages."""
    s, t, d, a = model.sequence, model.targets, model.width, model.heads * model.head_size
    hidden = 2.0 * d * model.ffn * (3 if model.activation == "geglu" else 2)
    encoder = s * (8.0 * d * a + hidden) + 4.0 * s * s * a
    decoder = t * (8.0 * d * a + hidden) + 4.0 * t * t * a + 4.0 * d * a * (s + t) + 4.0 * s * t * a
    moved = 8.0 * model.length * d
    return [moved, *[encoder] * model.layers, moved, *[decoder] * model.layers, 2.0 * t * d * model.vocab]
