"""A model in shape form: what its cost depends on, and nothing else.

A model is a row of pieces: embedding, blocks, head. A dense block is attention and a feed-forward part; a sparse one
has experts of which each token uses some. `Shape` is frozen: what is computed from it can be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.kinds import Bert, Model, MoE


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    causal: bool = True
    positions: int = 0
    """Learned positions."""
    experts: int = 0
    chosen: int = 0
    """Experts that a token uses."""
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Feed-forward width that every token uses beside its experts."""
    sparse_layers: int = 0
    """Blocks with experts; the others are dense."""
    q_rank: int = 0
    kv_rank: int = 0
    """Latent attention: queries, and keys with values, pass through so many numbers a token."""
    rope_size: int = 0
    """Latent attention: features of a head that carry the position."""
    predicted: float = 1.0
    """Share of the positions whose logits are made."""

    @property
    def stages(self) -> int:
        """Into how many a pipeline can cut it."""
        return self.layers

    @property
    def contexts(self) -> int:
        """Positions that context ranks can share."""
        return self.sequence

    def precision(self, asked: str) -> str:
        """Of the products, in a job that asks for one."""
        return asked

    @cached_property
    def query(self) -> int:
        return self.heads * (self.head_size + self.rope_size)

    @cached_property
    def attended(self) -> int:
        """Numbers a token that attention gives out."""
        return self.heads * self.head_size

    @cached_property
    def projections(self) -> tuple[tuple[int, int, bool], ...]:
        """The products of attention as (in, out, cut by the tensor axis)."""
        width, kv = self.width, self.kv_heads * self.head_size
        if not self.kv_rank:
            return ((width, self.query + 2 * kv, True), (self.attended, width, True))
        down = self.q_rank + self.kv_rank + self.rope_size
        up = (self.q_rank, self.query, True), (self.kv_rank, 2 * self.attended, True)
        return ((width, down, False), *up, (self.attended, width, True))

    @cached_property
    def attention_weights(self) -> int:
        return sum(inner * outer for inner, outer, _ in self.projections)

    @cached_property
    def matrices(self) -> int:
        """Matrices of width x hidden in a feed-forward part."""
        return 3 if self.gated else 2

    @cached_property
    def dense_ffn_weights(self) -> int:
        return self.matrices * self.width * self.ffn

    @cached_property
    def expert_weights(self) -> int:
        """Of all experts of one block."""
        return self.experts * self.matrices * self.width * self.expert_ffn

    @cached_property
    def common_weights(self) -> int:
        """Of a sparse block without its experts."""
        return self.attention_weights + self.matrices * self.width * self.shared_ffn + self.width * self.experts

    @cached_property
    def table_weights(self) -> int:
        return (self.vocab + self.positions) * self.width

    @cached_property
    def parameters(self) -> int:
        dense = (self.layers - self.sparse_layers) * (self.attention_weights + self.dense_ffn_weights)
        sparse = self.sparse_layers * (self.common_weights + self.expert_weights)
        return dense + sparse + self.table_weights + (0 if self.tied else self.vocab * self.width)

    @cached_property
    def active_parameters(self) -> int:
        """Weights in the products that one token goes through, the head included."""
        unused = 0.0
        if self.experts:
            unused = self.sparse_layers * self.expert_weights * (1 - self.chosen / self.experts)
        return round(self.parameters - unused - self.table_weights + (self.vocab * self.width if self.tied else 0))

    def flops(self, samples: int) -> float:
        """Of forward and backward, attention counted as it must be computed: half of the square where causal."""
        head = 2.0 * self.predicted * samples * self.sequence * self.vocab * self.width
        return 3.0 * (self.block_flops(samples) + head)

    def block_flops(self, samples: int) -> float:
        """Of the forward of all blocks: what full recomputation computes again."""
        tokens = samples * self.sequence
        square = 2.0 * tokens * self.sequence * (self.query + self.attended) * (0.5 if self.causal else 1.0)
        return 2.0 * (self.active_parameters - self.vocab * self.width) * tokens + self.layers * square


def shape_of(model: Model) -> Shape:
    """The shape of a job's model, where it is a row of equal blocks."""
    more: dict[str, Any] = {}
    if isinstance(model, MoE):
        more = {
            "experts": model.experts, "chosen": model.experts_per_token, "expert_ffn": model.expert_ffn,
            "shared_ffn": model.shared_ffn, "sparse_layers": model.layers - model.dense_layers,
            "q_rank": model.q_rank, "kv_rank": model.kv_rank, "rope_size": model.rope_size,
        }  # fmt: skip
    if isinstance(model, Bert):
        more = {"causal": False, "predicted": model.masked}
    return Shape(
        layers=model.layers, width=model.width, heads=model.heads, kv_heads=model.kv_heads, head_size=model.head_size,
        ffn=model.ffn, vocab=model.vocab, sequence=model.sequence, gated=model.activation == "swiglu",
        tied=model.tied, positions=model.sequence if model.positions == "learned" else 0, **more,
    )  # fmt: skip
