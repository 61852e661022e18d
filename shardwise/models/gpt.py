"""Decoder-only transformers: GPT-2, GPT-3 and Llama shapes from one config, written for one device.

Shape letters: B samples, S positions, D width, K key/value heads, G query heads per key/value head, H features per
head, F hidden features of the MLP, V vocabulary.

One matmul computes queries, keys and values. The rows of its weight are grouped by key/value head: G query heads, the
key head, the value head. A rank that holds whole groups computes their attention without communication.

Multi-head latent attention (DeepSeek-AI 2024, section 2.1) computes queries, keys and values from low-rank projections.
Each head's query and key have `head_dim` features without RoPE ("nope") and R = `qk_rope_head_dim` features with it;
all heads share the RoPE part of the key."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import sharding
from shardwise.models.chain import Chain
from shardwise.models.config import ModelConfig
from shardwise.models.gpt_family import DecoderConfig, MoEConfig
from shardwise.models.layers import Linear, RMSNorm, apply_rope, positions_in_documents, rope_angles, sdpa
from shardwise.models.loss import VocabShard, fused_linear_cross_entropy, loss_chunk_size
from shardwise.models.moe import MoE
from shardwise.models.preference import plain_targets, preference_weights
from shardwise.models.t5_family import T5Config
from shardwise.random import Dropout


def build_gpt(config: DecoderConfig, seed: int) -> Chain:
    """Returns the chain embed, block0, block1, ..., head."""
    dense_layers = config.dense_layers if isinstance(config, MoEConfig) else config.layers
    names = [f"block{layer}" for layer in range(config.layers)]
    blocks = [(name, DecoderBlock(config, name, seed, layer >= dense_layers)) for layer, name in enumerate(names)]
    embed, head = DecoderEmbedding(config, seed), DecoderHead(build_norm(config), LMHead(config))
    chain = Chain([("embed", embed), *blocks, ("head", head)], sharding_plan(config))
    for module in chain.modules():
        if isinstance(module, Linear | LMHead):
            module.scale = 1.0 / mup_width_multiplier(config)
        if isinstance(module, SelfAttention) and config.mup_base_width:
            module.scale = module.head_dim**-0.5  # muP divides scores by head_dim, not by its root
    return chain


def mup_width_multiplier(config: DecoderConfig) -> float:
    """Returns m, the width relative to the base model whose learning rate was tuned (muP, Yang et al. 2022).

    The paper scales the initial std of hidden matrices by 1/sqrt(m), their learning rate by 1/m and the logits by 1/m.
    Adam ignores the scale of gradients, so an initial std scaled by sqrt(m) and hidden matmuls scaled by 1/m train the
    same with one learning rate for all parameters. The optimizer needs no change."""
    return config.width / config.mup_base_width if config.mup_base_width else 1.0


def configure_modules(chain: Chain, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, pipelined: bool,
                      use_fp8: bool, loss_chunk_size: int, aux_loss_scale: Callable[[], Tensor]) -> None:  # fmt: skip
    """Configures a chain once its weights have memory: RoPE tables that all blocks share, FP8, the loss chunk size (0,
    that is no chunks, in a pipeline) and the scale of the experts' auxiliary loss."""
    for module in chain.modules():
        if isinstance(module, MoE):
            module.aux_loss_scale = aux_loss_scale
            module.reset_buffers()
        if isinstance(module, Linear | LMHead):
            module.use_fp8 = use_fp8
        if isinstance(module, LMHead):
            module.loss_chunk_size = 0 if pipelined else loss_chunk_size or module.loss_chunk_size
    rope_modules: list[Any] = [module for module in chain.modules() if getattr(module, "rope_theta", None) is not None]
    if rope_modules and isinstance(config, DecoderConfig):
        rope_dim = config.qk_rope_head_dim if isinstance(config, MoEConfig) and config.kv_lora_rank else config.head_dim
        cos, sin = rope_angles(config.sequence, rope_dim, config.rope_theta, device, config.rope_scaling)
        rope_dtype = torch.promote_types(dtype, torch.float32)
        rope_cos_sin = cos.to(rope_dtype), sin.to(rope_dtype)
        for attention in rope_modules:
            attention.rope_cos_sin = rope_cos_sin


def sharding_plan(config: DecoderConfig) -> sharding.ShardingPlan:
    group_rows = (config.heads // config.kv_heads + 2) * config.head_dim
    value_rows = config.heads // config.kv_heads * config.head_dim
    rope_dim = config.qk_rope_head_dim if isinstance(config, MoEConfig) else 0
    hidden_std = config.init_std * math.sqrt(mup_width_multiplier(config))
    residual_std = hidden_std / math.sqrt(2 * config.layers)  # GPT-2: of the matrices that write to the residual stream
    query_rows, value_columns = zip(*(_query_head_rows(config, query) for query in range(config.heads)))
    return sharding.ShardingPlan(
        shard_dims=(
            sharding.Rowwise("embed.tokens.weight", dim=0),
            sharding.Colwise("block*.attention.qkv.*", unit=group_rows, head_rows=query_rows),
            sharding.Rowwise("block*.attention.out.weight", unit=value_rows, head_rows=value_columns),
            sharding.Colwise("block*.attention.q_up.weight", unit=config.head_dim + rope_dim),
            sharding.Colwise("block*.attention.kv_up.weight", unit=2 * config.head_dim),
            *(sharding.Colwise(name) for name in ("block*.up.*", "block*.gate.*", "head.project.weight")),
            sharding.Rowwise("block*.down.weight"),
            *(sharding.Colwise(f"block*.mlp.bank.{name}", dim=1) for name in ("up", "gate")),
            sharding.Rowwise("block*.mlp.bank.down", dim=2),
        ),
        modules=(
            sharding.VocabEmbedding("embed.tokens"),
            # With uneven heads, each query head gets its own copy of its key and value head.
            sharding.SequenceRegion("block*.attention", rowwise="out", uneven=(("queries_per_kv_head", 1),)),
            sharding.SequenceRegion("block*.mlp", rowwise="down"),
            sharding.VocabHead("head.project"),
        ),
        ties=(("head.project.weight", "embed.tokens.weight"),) if config.tied else (),
        init=(
            ("*norm*.weight", sharding.InitSpec("ones")),
            ("*.bias", sharding.InitSpec("zeros")),
            *((name, sharding.InitSpec("normal", residual_std))
              for name in ("*.attention.out.weight", "*.down.weight", "*.mlp.bank.down")),
            *((name, sharding.InitSpec("normal", config.init_std)) for name in ("embed.*", "head.*")),
            ("*", sharding.InitSpec("normal", hidden_std)),
        ),
        compared_modules=("embed", "block*.norm1", "block*.attention", "block*.norm2", "block*.mlp", "block*",
                          "head.norm"),
    )  # fmt: skip


def _query_head_rows(config: DecoderConfig, query: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the rows of `qkv` that a query head needs (query, key, value), and its columns of `out`."""
    group, size = config.heads // config.kv_heads, config.head_dim
    first = query // group * (group + 2)
    heads = (first + query % group, first + group, first + group + 1)
    rows = tuple(head * size + i for head in heads for i in range(size))
    return rows, tuple(range(query * size, (query + 1) * size))


class DecoderEmbedding(nn.Module):
    def __init__(self, config: DecoderConfig | T5Config, seed: int):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = LearnedPositions(config.sequence, config.width) if config.positions == "learned" else None
        self.dropout = Dropout(config.dropout, "embed", seed)

    def forward(self, tokens: Tensor, ids: Tensor | None = None, **batch: Tensor | None) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(x.shape[1], batch.get("document_ids"))
        return self.dropout(x, ids)


class LearnedPositions(nn.Module):
    """Learned position embeddings, of `position_ids` if set, otherwise of the first positions. They restart with each
    document; RoPE need not, since attention within a document depends on distances only."""

    def __init__(self, sequence: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence, width))
        self.position_ids: Tensor | None = None

    def forward(self, length: int, document_ids: Tensor | None = None) -> Tensor:
        if document_ids is not None:
            restarted = positions_in_documents(document_ids)
            return self.weight[restarted if self.position_ids is None else restarted[:, self.position_ids]]
        return self.weight[:length] if self.position_ids is None else self.weight[self.position_ids]


class DecoderBlock(nn.Module):
    def __init__(self, config: DecoderConfig, name: str, seed: int, is_moe: bool = False):
        super().__init__()
        self.norm1 = build_norm(config)
        if isinstance(config, MoEConfig) and config.kv_lora_rank:
            self.attention: nn.Module = MultiHeadLatentAttention(config)
        else:
            self.attention = SelfAttention(config)
        self.dropout1 = Dropout(config.dropout, f"{name}.1", seed)
        self.norm2 = build_norm(config)
        if is_moe and isinstance(config, MoEConfig):
            shared = config.model_copy(update={"ffn": config.shared_expert_ffn, "bias": False})
            self.mlp: nn.Module = MoE(config, FeedForward(shared) if config.shared_expert_ffn else None)
        else:
            self.mlp = FeedForward(config)
        self.dropout2 = Dropout(config.dropout, f"{name}.2", seed)

    def forward(self, x: Tensor, ids: Tensor | None = None, document_ids: Tensor | None = None,
                **batch: Tensor | None) -> Tensor:  # fmt: skip
        x = x + self.dropout1(self.attention(self.norm1(x), document_ids), ids)
        return x + self.dropout2(self.mlp(self.norm2(x)), ids)


def build_norm(config: DecoderConfig | T5Config) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


class SelfAttention(nn.Module):
    """Grouped-query attention. The weights determine the number of heads, so it also runs on sharded weights."""

    def __init__(self, config: DecoderConfig, causal: bool = True):
        super().__init__()
        self.causal = causal
        self.queries_per_kv_head = config.heads // config.kv_heads
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta if config.positions == "rotary" else None
        self.rope_scaling = config.rope_scaling
        self.rope_cos_sin: tuple[Tensor, Tensor] | None = None
        self.scale = 1.0
        self.attention_fn: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor] = sdpa
        """Context parallelism replaces it (`shardwise.parallel.context`): a rank then has only part of the sequence."""
        bias = config.bias or config.qkv_bias
        self.qkv = Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.out = Linear(config.heads * config.head_dim, config.width, bias=config.bias)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.queries_per_kv_head + 2, self.head_dim))  # B S K G+2 H
        q = qkv[..., : self.queries_per_kv_head, :].flatten(2, 3)  # B S KG H
        k, v = qkv[..., self.queries_per_kv_head, :], qkv[..., self.queries_per_kv_head + 1, :]  # B S K H
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            sizes = x.shape[1], self.head_dim, self.rope_theta
            rope_cos_sin = self.rope_cos_sin or rope_angles(*sizes, x.device, self.rope_scaling)
            q, k = apply_rope(q, rope_cos_sin), apply_rope(k, rope_cos_sin)
        q = q if self.scale == 1.0 else q * self.scale
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B KG S H, as views: memory stays B S KG H
        return self.out(self.attention_fn(q, k, v, self.causal, document_ids).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The MLP of a block. In gated ones (SwiGLU, GEGLU), a second projection multiplies the activations."""

    def __init__(self, config: DecoderConfig | T5Config, approximate: str = "tanh"):
        super().__init__()
        gelu = partial(F.gelu, approximate=approximate)
        activations: dict[str, Any] = {"gelu": gelu, "geglu": gelu, "swiglu": F.silu, "relu": F.relu}
        self.activation, is_gated = activations[config.activation], config.activation.endswith("glu")
        self.gate = Linear(config.width, config.ffn, bias=config.bias) if is_gated else None
        self.up = Linear(config.width, config.ffn, bias=config.bias)
        self.down = Linear(config.ffn, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class DecoderHead(nn.Module):
    """The final norm and the LM head; without a head, that of an encoder."""

    def __init__(self, norm: nn.Module, project: "LMHead | None"):
        super().__init__()
        self.norm, self.project = norm, project

    def forward(self, x: Tensor, targets: Tensor | None = None, **batch: Tensor | None) -> Tensor:
        x = self.norm(x)
        return x if self.project is None else self.project(x, targets, batch.get("preference"))


class LMHead(nn.Module):
    """Projects to the vocabulary. Returns logits, or the loss summed over the targets if there are any."""

    def __init__(self, config: DecoderConfig | T5Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab, config.width))
        self.vocab_shard: VocabShard | None = None
        self.loss_chunk_size = loss_chunk_size(config.vocab)  # positions whose logits are in memory at once; 0: all
        self.use_fp8 = False
        self.scale = 1.0
        self.sequence_shards = 1  # context parallelism sets this and what sums over the shards
        self.all_reduce_sum: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None, preference: Tensor | None = None) -> Tensor:
        x = x if self.scale == 1.0 else x * self.scale
        if targets is None:
            return F.linear(x, self.weight)
        weigh = None
        if preference is not None:
            weigh = preference_weights(targets, preference, self.all_reduce_sum, self.sequence_shards)
            targets = plain_targets(targets)
        options = self.vocab_shard, self.loss_chunk_size, self.use_fp8, weigh
        return fused_linear_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), *options)


class MultiHeadLatentAttention(nn.Module):
    def __init__(self, config: MoEConfig):
        super().__init__()
        self.head_dim, self.rope_dim, self.kv_lora_rank = config.head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        self.rope_theta, self.rope_scaling = config.rope_theta, config.rope_scaling
        self.rope_cos_sin: tuple[Tensor, Tensor] | None = None
        self.q_down = Linear(config.width, config.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        query_width = config.heads * (config.head_dim + config.qk_rope_head_dim)
        self.q_up = Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_down = Linear(config.width, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.kv_up = Linear(config.kv_lora_rank, 2 * config.heads * config.head_dim, bias=False)
        self.out = Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (-1, self.head_dim + self.rope_dim))  # B S heads H+R
        kv_latent, k_rope = self.kv_down(x).split((self.kv_lora_rank, self.rope_dim), -1)
        k, v = self.kv_up(self.kv_norm(kv_latent)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)  # B S heads H
        if self.rope_dim:
            sizes = x.shape[1], self.rope_dim, self.rope_theta
            rope_cos_sin = self.rope_cos_sin or rope_angles(*sizes, x.device, self.rope_scaling)
            q_nope, q_rope = q.split((self.head_dim, self.rope_dim), -1)
            q = torch.cat((q_nope, apply_rope(q_rope, rope_cos_sin)), -1)
            k = torch.cat((k, apply_rope(k_rope.unsqueeze(2), rope_cos_sin).expand(-1, -1, k.shape[2], -1)), -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = sdpa(q, k, v, causal=True, document_ids=document_ids)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class KeyValueCache:
    """A key-value cache for generation on one device, so that each token goes through the model once.

    Makes a decoder take the next tokens of rows of one length; `close` makes it a plain decoder again."""

    def __init__(self, model: Chain, config: DecoderConfig):
        self.model, self.config, self.length = model, config, 0
        self.attentions: list[Any] = [module for module in model.modules() if isinstance(module, SelfAttention)]
        self.positions = getattr(model.get_submodule("embed"), "positions", None)
        self.kept: list[list[Tensor]] = [[] for _ in self.attentions]
        for attention, kept in zip(self.attentions, self.kept):
            attention.attention_fn = lambda q, k, v, causal, _, kept=kept: self._attend(q, k, v, kept)
        self.ropes = [attention.rope_cos_sin for attention in self.attentions]

    @staticmethod
    def supports(model: Any, config: Any) -> bool:
        """Whether the logits do not change with a cache: not with masked documents, latent attention or experts, whose
        capacity counts the tokens of a batch."""
        found = sum(isinstance(module, SelfAttention) for module in model.modules())
        return found == getattr(config, "layers", 0) and config.document_separator < 0 and not config.num_experts

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, kept: list[Tensor]) -> Tensor:
        if kept:
            k, v = torch.cat((kept[0], k), 2), torch.cat((kept[1], v), 2)
        kept[:] = k, v
        return sdpa(q, k, v, causal=q.shape[2] > 1)  # more than one token only at the start

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns the logits after the last of these tokens, which follow those of earlier calls."""
        start, self.length = self.length, self.length + tokens.shape[1]
        if self.positions is not None:
            self.positions.position_ids = torch.arange(start, self.length, device=tokens.device)
        for attention in self.attentions if self.positions is None else ():
            theta, scaling = attention.rope_theta, attention.rope_scaling
            cos, sin = rope_angles(self.length, attention.head_dim, theta, tokens.device, scaling)
            attention.rope_cos_sin = cos[start:], sin[start:]
        return self.model(tokens)[:, -1]  # type: ignore[no-any-return]

    def close(self) -> None:
        for attention, rope in zip(self.attentions, self.ropes):
            attention.attention_fn, attention.rope_cos_sin = sdpa, rope
        if self.positions is not None:
            self.positions.position_ids = None
