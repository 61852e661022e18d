"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1): queries, keys and values from low-rank projections.

Each head's query and key have `head_dim` features without RoPE ("nope") and `qk_rope_head_dim` features with it; all
heads share the RoPE part of the key. Shape letters are those of `gpt`; R is `qk_rope_head_dim`.
"""

import torch
from torch import Tensor, nn

from shardwise.models import layers
from shardwise.models.moe_family import MoEConfig


class MultiHeadLatentAttention(nn.Module):
    def __init__(self, config: MoEConfig):
        super().__init__()
        self.head_dim, self.rope_dim, self.kv_lora_rank = config.head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        self.rope_theta = config.rope_theta
        self.rope_cos_sin: tuple[Tensor, Tensor] | None = None
        self.q_down = layers.Linear(config.width, config.q_lora_rank, bias=False)
        self.q_norm = layers.RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        query_width = config.heads * (config.head_dim + config.qk_rope_head_dim)
        self.q_up = layers.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_down = layers.Linear(config.width, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = layers.RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.kv_up = layers.Linear(config.kv_lora_rank, 2 * config.heads * config.head_dim, bias=False)
        self.out = layers.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (-1, self.head_dim + self.rope_dim))  # B S heads H+R
        kv_latent, k_rope = self.kv_down(x).split((self.kv_lora_rank, self.rope_dim), -1)
        k, v = self.kv_up(self.kv_norm(kv_latent)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)  # B S heads H
        if self.rope_dim:
            rope_cos_sin = self.rope_cos_sin or layers.rope_angles(x.shape[1], self.rope_dim, self.rope_theta, x.device)
            q_nope, q_rope = q.split((self.head_dim, self.rope_dim), -1)
            q = torch.cat((q_nope, layers.apply_rope(q_rope, rope_cos_sin)), -1)
            k = torch.cat((k, layers.apply_rope(k_rope.unsqueeze(2), rope_cos_sin).expand(-1, -1, k.shape[2], -1)), -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = layers.sdpa(q, k, v, causal=True, document_ids=document_ids)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
