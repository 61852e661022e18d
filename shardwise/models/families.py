"""Which file builds which kind of model."""

from __future__ import annotations

from shardwise.kinds import T5, Bert, Model
from shardwise.models import bert, gpt, t5
from shardwise.models.chain import Chain


def chain_of(model: Model | T5, seed: int) -> Chain:
    """The whole model, its weights not yet started."""
    if isinstance(model, T5):
        return t5.t5(model, seed)
    return bert.bert(model, seed) if isinstance(model, Bert) else gpt.gpt(model, seed)


def cost_of(model: Model | T5) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain."""
    if isinstance(model, T5):
        return t5.cost(model)
    return bert.cost(model) if isinstance(model, Bert) else gpt.cost(model)
