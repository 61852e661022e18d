"""Which file builds which kind of model."""

from __future__ import annotations

from shardwise.kinds import BertConfig, DecoderConfig, ResNetConfig, T5Config
from shardwise.models import bert, gpt, resnet, t5
from shardwise.models.chain import Chain

ChainModelConfig = DecoderConfig | T5Config | ResNetConfig


def build_chain(config: ChainModelConfig, seed: int) -> Chain:
    """The whole model, its weights not yet started."""
    if isinstance(config, ResNetConfig):
        return resnet.build_resnet(config, seed)
    if isinstance(config, T5Config):
        return t5.build_t5(config, seed)
    return bert.build_bert(config, seed) if isinstance(config, BertConfig) else gpt.build_gpt(config, seed)


def forward_flops_per_module(config: ChainModelConfig) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain."""
    if isinstance(config, ResNetConfig):
        return resnet.forward_flops(config)
    if isinstance(config, T5Config):
        return t5.forward_flops(config)
    return bert.forward_flops(config) if isinstance(config, BertConfig) else gpt.forward_flops(config)
