"""Latent attention (DeepSeek-AI 2024, section 2.1): queries, keys and values are made from a few numbers of a token.

A head's query and key have `head_size` features from those numbers and `rope_size` that carry the position; of the key
the latter are the same for all heads. Letters in shapes as in `gpt`; R features with positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.kinds import MoE
from shardwise.models import parts


class Latent(nn.Module):
    def __init__(self, model: MoE):
        super().__init__()
        self.size, self.rope, self.kv_rank = model.head_size, model.rope_size, model.kv_rank
        self.theta = model.rope_theta
        self.turn: tuple[Tensor, Tensor] | None = None
        self.q_down = parts.Product(model.width, model.q_rank, bias=False)
        self.q_norm = parts.RMSNorm(model.q_rank, eps=model.norm_eps)
        self.q_up = parts.Product(model.q_rank, model.heads * (model.head_size + model.rope_size), bias=False)
        self.kv_down = parts.Product(model.width, model.kv_rank + model.rope_size, bias=False)
        self.kv_norm = parts.RMSNorm(model.kv_rank, eps=model.norm_eps)
        self.kv_up = parts.Product(model.kv_rank, 2 * model.heads * model.head_size, bias=False)
        self.out = parts.Product(model.heads * model.head_size, model.width, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (-1, self.size + self.rope))  # B S heads H+R
        few, place = self.kv_down(x).split((self.kv_rank, self.rope), -1)
        k, v = self.kv_up(self.kv_norm(few)).unflatten(-1, (-1, 2 * self.size)).chunk(2, -1)  # B S heads H
        if self.rope:
            turn = self.turn or parts.rotation(x.shape[1], self.rope, self.theta, x.device)
            plain, turned = q.split((self.size, self.rope), -1)
            q = torch.cat((plain, parts.rotate(turned, turn)), -1)
            k = torch.cat((k, parts.rotate(place.unsqueeze(2), turn).expand(-1, -1, k.shape[2], -1)), -1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = parts.attend(q, k, v, True, documents)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
