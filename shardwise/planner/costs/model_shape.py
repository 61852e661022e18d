"""Which cost model the planner uses for a model config. The only planner file that asks what kind of model it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from shardwise.kinds import BertConfig, DecoderConfig, DLRMConfig, ModelConfig, MoEConfig, ResNetConfig, T5Config
from shardwise.models.chain import Chain
from shardwise.models.dlrm import build_dlrm
from shardwise.models.registry import build_chain
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.module_trace import interpolate_traces, trace_module
from shardwise.planner.costs.operator_costs import OperatorCosts
from shardwise.planner.costs.operator_list import (
    HostEmbeddingTables,
    OperatorListModel,
    operator_list_model,
    resnet_operators,
    t5_operators,
)


def shape_of(config: ModelConfig, itemsize: int = 4) -> ModelShape:
    """Returns the shape of a decoder, or the operator list of any other model; `itemsize`: bytes per activation."""

    def make(operators: Callable[..., Iterator[OperatorCosts]]) -> Callable[..., tuple[OperatorCosts, ...]]:
        return lru_cache(maxsize=64)(lambda *key: tuple(operators(config, itemsize, *key)))

    if isinstance(config, T5Config):
        return operator_list_model(make(t5_operators), heads=config.heads, sequence=config.length, has_ends=True)
    if isinstance(config, ResNetConfig):
        return operator_list_model(make(resnet_operators))
    if isinstance(config, DLRMConfig):
        return _dlrm_model(config, itemsize)
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"the planner has no cost model for {type(config).__name__}")
    extra: dict[str, Any] = {"has_engine_model": type(config) is DecoderConfig}
    if isinstance(config, MoEConfig):
        keys = ("experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "q_lora_rank", "kv_lora_rank",
                "qk_rope_head_dim")  # fmt: skip
        extra |= {key: getattr(config, key) for key in keys}
        extra["sparse_layers"] = config.layers - config.dense_layers
    if isinstance(config, BertConfig):
        extra |= {"causal": False, "logit_fraction": config.mlm_probability}
    return ModelShape(
        layers=config.layers, width=config.width, heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, ffn=config.ffn, vocab=config.vocab, sequence=config.sequence,
        gated=config.activation == "swiglu", tied=config.tied,
        positions=config.sequence if config.positions == "learned" else 0, **extra,
    )  # fmt: skip


def build_on_meta(config: ModelConfig) -> Chain:
    """Builds a model on the meta device."""
    with torch.device("meta"):
        return build_dlrm(config) if isinstance(config, DLRMConfig) else build_chain(config, 0)  # type: ignore[arg-type]


def _dlrm_model(config: DLRMConfig, itemsize: int) -> OperatorListModel:
    row_bytes = 4.0 * config.width
    pooled_bytes = config.tables * row_bytes
    tables = HostEmbeddingTables(
        bytes=row_bytes * sum(config.table_rows), rows=pooled_bytes * config.lookups, pooled_bytes=pooled_bytes
    )
    return operator_list_model(interpolate_traces(partial(_trace_dlrm, config, itemsize)), tables)


@lru_cache(maxsize=16)
def _trace_dlrm(config: DLRMConfig, itemsize: int, samples: int) -> tuple[OperatorCosts, ...]:
    """Traces the dense part; the pooled rows of the tables are an input."""
    dtype = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}[itemsize]
    numbers, labels = torch.empty(samples, config.dense_features, dtype=dtype), torch.empty(samples)
    vectors = torch.empty(samples, config.tables, config.width, dtype=dtype, requires_grad=True)
    return trace_module(build_on_meta(config).to(dtype), numbers, vectors, labels)
