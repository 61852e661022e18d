# ruff: noqa: E501 - one model per line
"""Verifies transformers models in float64, one tiny random model per family, in every axis of a layout and in a product
of three axes, and writes `docs/reference/transformers-models.md`.

    python benchmarks/transformers_matrix.py                        all families, about half an hour on two cores
    python benchmarks/transformers_matrix.py --only llama,bert      these families; the others keep their results
    python benchmarks/transformers_matrix.py --jobs 2               two families at a time
    python benchmarks/transformers_matrix.py --page                 only write the page from existing results

Results are kept in `--results`, one entry per family. A family runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "transformers-models.md"
STEPS, SEQUENCE, SAMPLES = 2, 16, 8
LIMIT = 900.0  # seconds per family

# Config fields of every family that has them.
COMMON: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "sliding_window": 6, "query_pre_attn_scalar": 8,
    "image_size": 16, "patch_size": 4, "num_labels": 5, "attention_dropout": 0.0, "attn_pdrop": 0.0,
    "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0, "drop_path_rate": 0.0, "residual_dropout": 0.0,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
IMAGES = {"num_key_value_heads": None}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1}  # fmt: skip
SSM = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}

# By model type: the name on the page, and config fields besides the common ones; None removes a common one.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi-3", {}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere 2", {}),
    "starcoder2": ("StarCoder2", {"embedding_dropout": 0.0}),
    "granite": ("Granite", {}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("GLM-4", {}),
    "stablelm": ("StableLM", {}),
    "nemotron": ("Nemotron", {}),
    "ministral": ("Ministral", {}),
    "seed_oss": ("Seed-OSS", {}),
    "exaone4": ("EXAONE 4", {}),
    "gpt_neox": ("GPT-NeoX", {}),
    "gpt2": ("GPT-2", GPT2),
    "gptj": ("GPT-J", {**GPT2, "rotary_dim": 4}),
    "gpt_neo": ("GPT-Neo", {
        "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6,
    }),
    "gpt_bigcode": ("GPT-BigCode", GPT2),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bloom": ("BLOOM", {"n_layer": 4, "n_head": 4}),
    "mpt": ("MPT", {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
    "falcon": ("Falcon", {}),
    "mixtral": ("Mixtral", {}),
    "qwen2_moe": ("Qwen2-MoE", {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3-MoE", {}),
    "olmoe": ("OLMoE", {}),
    "granitemoe": ("Granite-MoE", {}),
    "gpt_oss": ("gpt-oss", {}),
    "deepseek_v2": ("DeepSeek-V2", {**LATENT, "topk_method": "greedy", "n_group": 1}),
    "deepseek_v3": ("DeepSeek-V3", LATENT),
    "glm4_moe": ("GLM-4-MoE", {"first_k_dense_replace": 1}),
    "qwen3_next": ("Qwen3-Next", {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 24,
    }),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba-2", SSM),
    "bamba": ("Bamba", {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "attn_layer_indices": [1, 3],
    }),
    "bert": ("BERT", {}),
    "roberta": ("RoBERTa", {}),
    "xlm-roberta": ("XLM-RoBERTa", {}),
    "modernbert": ("ModernBERT", {"local_attention": 6}),
    "electra": ("ELECTRA", {"embedding_size": 16}),
    "albert": ("ALBERT", {"embedding_size": 16}),
    "distilbert": ("DistilBERT", {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48}),
    "mpnet": ("MPNet", {}),
    "deberta-v2": ("DeBERTa-v2", {}),
    "vit": ("ViT", IMAGES),
    "deit": ("DeiT", IMAGES),
    "beit": ("BEiT", IMAGES),
    "dinov2": ("DINOv2", IMAGES),
    "swin": ("Swin", {
        "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "num_attention_heads": None,
    }),
    "convnext": ("ConvNeXt", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1], "image_size": 32}),
    "resnet": ("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}),
    "t5": ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bart": ("BART", {
        "d_model": 32, "encoder_layers": 4, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
    }),
}  # fmt: skip

COLUMNS = {
    "shard": "shard=2 zero=3",
    "pipeline": "pipeline=2 micro_batch=2",
    "zero bubble": "pipeline=2 schedule=zero-bubble micro_batch=2",
    "tensor": "tensor=2",
    "context": "context=2",
    "expert": "shard=2 expert=2 zero=3",
}


def config_args(model_type: str) -> dict[str, Any]:
    """Returns the config fields of a tiny model."""
    import transformers

    defaults = transformers.CONFIG_MAPPING[model_type]()
    known = {*defaults.to_dict(), *getattr(defaults, "attribute_map", {})}
    own = FAMILIES[model_type][1]
    merged = {**{key: value for key, value in COMMON.items() if key in known}, **own}
    return {key: value for key, value in merged.items() if value is not None}


def make_family_job(model_type: str) -> Any:
    from shardwise.job import make_job

    model = {"name": f"hf:{model_type}", "args": config_args(model_type), "sequence": SEQUENCE}
    return make_job({"precision": "float64", "steps": STEPS, "model": model, "batch": {"samples": SAMPLES}})


def run_family(model_type: str) -> dict[str, Any]:
    """Returns the result of each column: an error, or the sentence with which the layout is refused."""
    import transformers

    from shardwise.errors import ShardwiseError

    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    try:
        job = make_family_job(model_type)
        refused = job.family.refusals(job.model)
    except ShardwiseError as error:
        return dict.fromkeys((*COLUMNS, "product"), {"refusal": str(error)})
    for column, layout in COLUMNS.items():
        results[column] = run_layout(job, layout)
    # The first three axes that the family has.
    axes = [axis for axis in ("pipeline", "shard", "tensor", "context", "replicate") if axis not in refused]
    axes = [axis for axis in axes if results.get(axis, {}).get("refusal") is None][:3]
    if len(axes) < 3:
        results["product"] = {"refusal": refused.get("replicate", "the model supports fewer than three axes.")}
    else:
        micro_batch = " micro_batch=1" if "pipeline" in axes else ""
        results["product"] = run_layout(job, " ".join(f"{axis}=2" for axis in axes) + micro_batch)
    return results


def run_layout(job: Any, text: str) -> dict[str, Any]:
    from shardwise.errors import ShardwiseError
    from shardwise.layout import Layout
    from shardwise.verify.parity import verify

    try:
        (result,) = verify(job, [Layout.parse(text)], steps=STEPS)
    except ShardwiseError as error:
        return {"layout": text, "refusal": str(error)}
    if not result.ok:
        return {"layout": text, "failure": result.describe()}
    return {"layout": text, "error": max(result.loss, result.grad_norm, result.grad, result.weight)}


def run_in_process(model_type: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--family", model_type]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        results = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        results = {"shard": {"failure": f"did not finish in {LIMIT:.0f} s"}}
    except (IndexError, ValueError):
        results = {"shard": {"failure": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"}}
    seconds = time.perf_counter() - start
    bad = {column: entry["failure"] for column, entry in results.items() if "failure" in entry}
    print(f"{model_type}: {seconds:.0f} s, {summary(results)}", *bad.items(), sep="\n    ", file=sys.stderr, flush=True)
    return results


def summary(results: dict[str, Any]) -> str:
    errors = [f"{column} {entry['error']:.0e}" for column, entry in results.items() if "error" in entry]
    return ", ".join(errors) or "refused"


def write_page(results: dict[str, Any]) -> str:
    """Returns the page: a row per family, and the refusals as numbered notes."""
    notes: list[str] = []
    rows = [cells(model_type, results[model_type], notes) for model_type in FAMILIES if model_type in results]
    entries = [entry for columns in results.values() for entry in columns.values()]
    worst = max((entry["error"] for entry in entries if "error" in entry), default=0.0)
    counts = [sum("error" in results[t].get(column, {}) for t in results) for column in (*COLUMNS, "product")]
    lines = [
        "# Axes that transformers models support",
        "",
        "Each row is a tiny random model of a transformers family, built from `model.name = \"hf:TYPE\"`. Each cell is",
        "the largest relative error of loss, gradient norm, gradients and updated weights after two steps in float64,",
        "against transformers' own unmodified module in one process; `-` means not supported, with the number of the",
        "reason below the table. `python benchmarks/transformers_matrix.py` writes this page.",
        "",
        *(f"- *{column}*: `{layout}`" for column, layout in COLUMNS.items()),
        "- *product*: three axes of degree 2: p = pipeline, s = shard, t = tensor, c = context, r = replicate",
        "",
        f"{len(rows)} families. Equal to one process: "
        + ", ".join(f"{column} {count}" for column, count in zip((*COLUMNS, "product"), counts, strict=True))
        + f". The largest error is {worst:.0e}.",
        "",
        "| family | type | " + " | ".join((*COLUMNS, "product")) + " |",
        "| --- | --- |" + " --- |" * (len(COLUMNS) + 1),
        *rows,
        "",
        *(f"{number}. {note}" for number, note in enumerate(notes, start=1)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def cells(model_type: str, results: dict[str, Any], notes: list[str]) -> str:
    row = [FAMILIES[model_type][0], f"`{model_type}`"]
    for column in (*COLUMNS, "product"):
        entry = results.get(column, {"failure": "not run"})
        if "error" in entry:
            axes = "".join(word[0] for word in entry["layout"].split() if "micro" not in word)
            row.append(f"{entry['error']:.0e}" + (f" ({axes})" if column == "product" else ""))
        elif "failure" in entry:
            row.append("**wrong**")
        else:
            sentence = re.sub(r"^(\w+=\S+: )?(\w+Config: )?", "", entry["refusal"])
            if sentence not in notes:
                notes.append(sentence)
            row.append(f"- ({notes.index(sentence) + 1})")
    return f"| {' | '.join(row)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--results", type=Path, default=Path("transformers_matrix.json"))
    parser.add_argument("--page", action="store_true", help="only write the page from existing results")
    parser.add_argument("--family", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.family:
        print(json.dumps(run_family(options.family)))
        return 0
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {}
    chosen = [] if options.page else options.only.split(",") if options.only else list(FAMILIES)
    with ThreadPoolExecutor(options.jobs) as pool:
        for model_type, columns in zip(chosen, pool.map(run_in_process, chosen), strict=True):
            results[model_type] = columns
            options.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    PAGE.write_text(write_page(results), encoding="utf-8")
    wrong = [model_type for model_type, columns in results.items() if any("failure" in c for c in columns.values())]
    print(f"{len(results)} families; wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
