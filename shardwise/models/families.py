"""Which file builds which kind of model."""

from __future__ import annotations

from shardwise.kinds import T5, Bert, Model, ResNet
from shardwise.models import bert, gpt, resnet, t5
from shardwise.models.chain import Chain

Built = Model | T5 | ResNet


def chain_of(model: Built, seed: int) -> Chain:
    """The whole model, its weights not yet started."""
    if isinstance(model, ResNet):
        return resnet.resnet(model, seed)
    if isinstance(model, T5):
        return t5.t5(model, seed)
    return bert.bert(model, seed) if isinstance(model, Bert) else gpt.gpt(model, seed)


def cost_of(model: Built) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain."""
    if isinstance(model, ResNet):
        return resnet.cost(model)
    if isinstance(model, T5):
        return t5.cost(model)
    return bert.cost(model) if isinstance(model, Bert) else gpt.cost(model)
