"""A key-value cache for generation with our decoders on one device: each token goes through the model once."""

from typing import Any

import torch
from torch import Tensor

from shardwise.models.chain import Chain
from shardwise.models.gpt import SelfAttention
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.layers import rope_angles, sdpa


class KeyValueCache:
    """Makes a decoder take the next tokens of rows of one length; `close` makes it a plain decoder again."""

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
