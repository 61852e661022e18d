"""Our decoders as transformers' own modules: the independent implementation that `verify --against hf` compares with.

`reference_decoder` returns transformers' Llama or GPT-2 of the same shape, `reference_weights` our weights under its
parameter names. Our fused QKV projection stores its rows by KV head: the queries of a group, then its key and value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.gpt_family import DecoderConfig

LLAMA_NAMES = {
    "embed.tokens.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight",
    "head.project.weight": "lm_head.weight", "norm1.weight": "input_layernorm.weight",
    "norm2.weight": "post_attention_layernorm.weight", "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight", "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}  # fmt: skip
GPT2_NAMES = {
    "embed.tokens.weight": "transformer.wte.weight", "embed.positions.weight": "transformer.wpe.weight",
    "head.norm": "transformer.ln_f", "head.project.weight": "lm_head.weight", "norm1": "ln_1", "norm2": "ln_2",
    "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


def is_llama(config: DecoderConfig) -> bool:
    return (config.positions, config.norm, config.activation, config.bias) == ("rotary", "rms", "swiglu", False)


def reference_decoder(config: DecoderConfig) -> nn.Module | None:
    """Returns transformers' module of the same shape in float64; None if it has none or is not installed."""
    if type(config) is not DecoderConfig or config.mup_base_width or config.eod_token_id >= 0:
        return None
    try:
        import transformers
    except ImportError:
        return None
    sizes: dict[str, Any] = {"vocab_size": config.vocab, "tie_word_embeddings": config.tied}
    sizes["attn_implementation"] = "eager"
    if is_llama(config):
        llama = transformers.LlamaConfig(
            **sizes, hidden_size=config.width, num_hidden_layers=config.layers, num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_dim, intermediate_size=config.ffn,
            max_position_embeddings=config.sequence, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(llama).double()
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        model.model.rotary_emb.inv_freq = config.rope_theta**-exponents  # it was made in float32
        return model
    is_plain = config.kv_heads == config.heads and config.head_dim * config.heads == config.width
    kind = config.positions, config.norm, config.activation, config.bias
    if is_plain and kind == ("learned", "layer", "gelu", True):
        gpt2 = transformers.GPT2Config(
            **sizes, n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.ffn,
            n_positions=config.sequence, layer_norm_epsilon=config.norm_eps, activation_function="gelu_new",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2).double()
    return None


def reference_weights(config: DecoderConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns our weights, or gradients, under the parameter names and in the shapes of `reference_decoder`."""
    return dict(pair for name, tensor in weights.items() for pair in _renamed(config, name, tensor))


def _renamed(config: DecoderConfig, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    llama = is_llama(config)
    names, prefix = (LLAMA_NAMES, "model.layers.") if llama else (GPT2_NAMES, "transformer.h.")
    block, _, rest = name.partition(".")
    ours, prefix = (rest, f"{prefix}{block.removeprefix('block')}.") if block.startswith("block") else (name, "")
    if ours.startswith("attention.qkv."):
        parts = split_qkv(config, tensor)
        if llama:
            yield from ((f"{prefix}self_attn.{part}_proj.weight", value) for part, value in zip("qkv", parts))
        else:
            packed, leaf = torch.cat(parts), ours.removeprefix("attention.qkv.")
            yield f"{prefix}attn.c_attn.{leaf}", packed.T if leaf == "weight" else packed
        return
    if ours in names:
        yield prefix + names[ours], tensor
        return
    module, _, leaf = ours.rpartition(".")
    transposed = not llama and leaf == "weight" and module in ("attention.out", "mlp.up", "mlp.down")  # GPT-2's Conv1D
    yield f"{prefix}{names[module]}.{leaf}", tensor.T if transposed else tensor


def split_qkv(config: DecoderConfig, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection (or its bias) into queries, keys and values, each by head."""
    group = config.heads // config.kv_heads
    rows = fused.unflatten(0, (config.kv_heads, group + 2, config.head_dim))
    return rows[:, :group].flatten(0, 2), rows[:, group].flatten(0, 1), rows[:, group + 1].flatten(0, 1)
