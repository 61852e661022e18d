"""Published model shapes, by name. Sources: the papers and model cards named beside each."""

from __future__ import annotations

_GPT = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "norm_eps": 1e-5}
_GPT2 = {**_GPT, "vocab": 50257, "sequence": 1024, "tied": True}
_LLAMA3 = {
    "positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False, "dropout": 0.0,
    "vocab": 128256, "sequence": 8192, "rope_theta": 500000.0, "norm_eps": 1e-5, "kv_heads": 8,
}  # fmt: skip

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
}
# fmt: on
