"""A model in shape form: what its cost depends on, and nothing else.

A model is a row of pieces: embedding, blocks, head. A dense block is attention and a feed-forward part; a sparse one
has experts of which each token uses some. `ModelShape` is frozen: what is computed from it can be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.models.bert_family import BertConfig
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.moe_family import MoEConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    causal: bool = True
    positions: int = 0
    """Learned positions."""
    experts: int = 0
    experts_per_token: int = 0
    """Experts that a token uses."""
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    """Feed-forward width that every token uses beside its experts."""
    sparse_layers: int = 0
    """Blocks with experts; the others are dense."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Latent attention: queries, and keys with values, pass through so many numbers a token."""
    qk_rope_head_dim: int = 0
    """Latent attention: features of a head that carry the position."""
    logit_fraction: float = 1.0
    """Share of the positions whose logits are made."""

    @property
    def stages(self) -> int:
        """Into how many a pipeline can cut it."""
        return self.layers

    @property
    def context_positions(self) -> int:
        """Positions that context ranks can share."""
        return self.sequence

    def precision(self, requested: str) -> str:
        """Of the products, in a job that asks for one."""
        return requested

    @cached_property
    def query_width(self) -> int:
        return self.heads * (self.head_dim + self.qk_rope_head_dim)

    @cached_property
    def attention_width(self) -> int:
        """Numbers a token that attention gives out."""
        return self.heads * self.head_dim

    @cached_property
    def projections(self) -> tuple[tuple[int, int, bool], ...]:
        """The products of attention as (in, out, cut by the tensor axis)."""
        width, kv = self.width, self.kv_heads * self.head_dim
        if not self.kv_lora_rank:
            return ((width, self.query_width + 2 * kv, True), (self.attention_width, width, True))
        down = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
        up = (self.q_lora_rank, self.query_width, True), (self.kv_lora_rank, 2 * self.attention_width, True)
        return ((width, down, False), *up, (self.attention_width, width, True))

    @cached_property
    def attention_weights(self) -> int:
        return sum(inner * outer for inner, outer, _ in self.projections)

    @cached_property
    def ffn_matrices(self) -> int:
        """Matrices of width x hidden in a feed-forward part."""
        return 3 if self.gated else 2

    @cached_property
    def dense_ffn_weights(self) -> int:
        return self.ffn_matrices * self.width * self.ffn

    @cached_property
    def expert_weights(self) -> int:
        """Of all experts of one block."""
        return self.experts * self.ffn_matrices * self.width * self.expert_ffn

    @cached_property
    def non_expert_weights(self) -> int:
        """Of a sparse block without its experts."""
        return (
            self.attention_weights + self.ffn_matrices * self.width * self.shared_expert_ffn + self.width * self.experts
        )

    @cached_property
    def embedding_weights(self) -> int:
        return (self.vocab + self.positions) * self.width

    @cached_property
    def parameters(self) -> int:
        dense = (self.layers - self.sparse_layers) * (self.attention_weights + self.dense_ffn_weights)
        sparse = self.sparse_layers * (self.non_expert_weights + self.expert_weights)
        return dense + sparse + self.embedding_weights + (0 if self.tied else self.vocab * self.width)

    @cached_property
    def active_parameters(self) -> int:
        """Weights in the products that one token goes through, the head included."""
        unused = 0.0
        if self.experts:
            unused = self.sparse_layers * self.expert_weights * (1 - self.experts_per_token / self.experts)
        return round(self.parameters - unused - self.embedding_weights + (self.vocab * self.width if self.tied else 0))

    def flops(self, samples: int) -> float:
        """Of forward and backward, attention counted as it must be computed: half of the square where causal."""
        head = 2.0 * self.logit_fraction * samples * self.sequence * self.vocab * self.width
        return 3.0 * (self.block_flops(samples) + head)

    def block_flops(self, samples: int) -> float:
        """Of the forward of all blocks: what full recomputation computes again."""
        tokens = samples * self.sequence
        attention_flops = (
            2.0 * tokens * self.sequence * (self.query_width + self.attention_width) * (0.5 if self.causal else 1.0)
        )
        return 2.0 * (self.active_parameters - self.vocab * self.width) * tokens + self.layers * attention_flops


def shape_of(model: DecoderConfig) -> ModelShape:
    """The shape of a job's model, where it is a row of equal blocks."""
    extra: dict[str, Any] = {}
    if isinstance(model, MoEConfig):
        extra = {
            "experts": model.experts,
            "experts_per_token": model.experts_per_token,
            "expert_ffn": model.expert_ffn,
            "shared_expert_ffn": model.shared_expert_ffn,
            "sparse_layers": model.layers - model.dense_layers,
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_rope_head_dim": model.qk_rope_head_dim,
        }
    if isinstance(model, BertConfig):
        extra = {"causal": False, "logit_fraction": model.mlm_probability}
    return ModelShape(
        layers=model.layers, width=model.width, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
        ffn=model.ffn, vocab=model.vocab, sequence=model.sequence, gated=model.activation == "swiglu",
        tied=model.tied, positions=model.sequence if model.positions == "learned" else 0, **extra,
    )  # fmt: skip
