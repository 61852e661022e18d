"""Published model shapes by name, each with its source."""

_GPT = {"family": "gpt", "positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "norm_eps": 1e-5}
_GPT2 = {**_GPT, "vocab": 50257, "sequence": 1024, "tied": True}
_LLAMA3 = {
    "family": "gpt", "positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False,
    "vocab": 128256, "sequence": 8192, "rope_theta": 500000.0, "norm_eps": 1e-5, "kv_heads": 8,
}  # fmt: skip
_BERT = {"family": "bert", "vocab": 30522, "sequence": 512, "norm_eps": 1e-12}

# fmt: off
PRESETS: dict[str, dict[str, object]] = {
    # Radford et al. 2019
    "gpt2":        {**_GPT2, "layers": 12, "width": 768, "heads": 12},
    "gpt2-medium": {**_GPT2, "layers": 24, "width": 1024, "heads": 16},
    "gpt2-large":  {**_GPT2, "layers": 36, "width": 1280, "heads": 20},
    "gpt2-xl":     {**_GPT2, "layers": 48, "width": 1600, "heads": 25},
    # Brown et al. 2020, table 2.1
    "gpt3-175b":   {**_GPT, "layers": 96, "width": 12288, "heads": 96, "vocab": 50257, "sequence": 2048, "tied": True},
    # Grattafiori et al. 2024, table 3
    "llama3-8b":   {**_LLAMA3, "layers": 32, "width": 4096, "heads": 32, "ffn": 14336},
    "llama3-70b":  {**_LLAMA3, "layers": 80, "width": 8192, "heads": 64, "ffn": 28672},
    "llama3-405b": {**_LLAMA3, "layers": 126, "width": 16384, "heads": 128, "ffn": 53248},
    # Narayanan et al. 2021, table 1, last row
    "gpt-1t":      {**_GPT, "layers": 128, "width": 25600, "heads": 160, "vocab": 51200, "sequence": 2048,
                    "tied": True},
    # Jiang et al. 2024, table 1, and the model's configuration
    "mixtral-8x7b": {**_LLAMA3, "family": "moe", "layers": 32, "width": 4096, "heads": 32, "ffn": 14336, "vocab": 32000,
                     "sequence": 8192, "rope_theta": 1e6, "experts": 8, "experts_per_token": 2},
    # DeepSeek-AI 2024, section 4.2; without multi-token prediction
    "deepseek-v3": {**_LLAMA3, "family": "moe", "layers": 61, "width": 7168, "heads": 128, "kv_heads": 128,
                    "head_dim": 128, "ffn": 18432, "vocab": 129280, "sequence": 4096, "rope_theta": 1e4,
                    "norm_eps": 1e-6, "experts": 256, "experts_per_token": 8, "expert_ffn": 2048,
                    "shared_expert_ffn": 2048, "dense_layers": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
                    "router_bias_update_rate": 1e-3, "router_aux_loss_coef": 1e-4},
    # Devlin et al. 2018
    "bert-base":   {**_BERT, "layers": 12, "width": 768, "heads": 12},
    "bert-large":  {**_BERT, "layers": 24, "width": 1024, "heads": 16},
    # Raffel et al. 2020
    "t5-11b":      {"family": "t5", "layers": 24, "width": 1024, "heads": 128, "head_dim": 128, "ffn": 65536},
    # Criteo 1TB click logs, ids modulo 40 million, as in MLPerf Training 0.7 to 2.1
    "dlrm-mlperf": {"family": "dlrm", "tables": 26, "width": 128, "bottom": [512, 256],
                    "top": [1024, 1024, 512, 256], "rows": [
                        39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
                        11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36]},
    # He et al. 2015, table 1
    "resnet-50":   {"family": "resnet", "depth": 50},
    "resnet-101":  {"family": "resnet", "depth": 101},
    "resnet-152":  {"family": "resnet", "depth": 152},
}
# fmt: on
