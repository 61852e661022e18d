"""Weights in and out, one tiny random model per family, by the commands that a user types; writes
`docs/reference/weights.md`.

    python benchmarks/weights_matrix.py                        all families, about half an hour on two cores
    python benchmarks/weights_matrix.py --only llama,t5        these; the others keep their results
    python benchmarks/weights_matrix.py --page                 only write the page from existing results

A folder that transformers saved is (1) verified against `from_pretrained` of it, in one process and in a product of
three axes, (2) trained for 3 steps in that layout in float64, exported with `--check`, (3) trained for one step with a
learning rate of 0 and exported, which must give every tensor back bit by bit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers_matrix import FAMILIES, config_args

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "weights.md"
OWN_DECODER = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2")
SETS = {"mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}, "qwen3_moe": {"norm_topk_prob": True}}
TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "olmo2", "olmo3",
         "phi3", "gpt_neox", "cohere", "cohere2", "glm4", "smollm3", "granite", "gpt_oss", "deepseek_v3", "gpt2",
         "bert", "t5", "vit")  # fmt: skip
HEADER = """# Weights in and out

Each row is a tiny random model that transformers saved as a folder. *1 process* and *3 axes* are the largest relative
differences of loss, gradients and updated weights in float64 from the module that `from_pretrained` reads from that
folder; for our decoder, those of logits and gradients from transformers' module (`shardwise verify --against hf`), and
those of the layout from one process.
*export* is the difference between the logits of the run's model, after 3 steps in the three axes, and those of
the exported folder in transformers (`shardwise export --check`). *bit by bit*: exported without training, every tensor
of the folder comes back with the same bits. The model runs as transformers' own module (`hf:FOLDER`) or as our decoder
(`model.weights = FOLDER`). `python benchmarks/weights_matrix.py` writes this page.

| family | runs as | 1 process | 3 axes | layout | export | bit by bit |
| --- | --- | --- | --- | --- | --- | --- |
"""


def shardwise(*args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "shardwise", *args], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    return done.stdout


def save_folder(kind: str, folder: Path) -> None:
    """Saves a random model, in several files."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**config_args(kind) | SETS.get(kind, {}))
    autos = ("AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM", "AutoModelForSeq2SeqLM",
             "AutoModelForImageClassification")  # fmt: skip
    for auto in autos:
        try:
            model = getattr(transformers, auto).from_config(config)
            break
        except ValueError:
            continue
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms too
            weight.add_(0.02 * torch.randn(weight.shape))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="60KB")


def run_family(kind: str, own: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        save_folder(kind, place / "base")
        model = [f"model.weights={place / 'base'}"] if own else [f"model.name=hf:{place / 'base'}"]
        data = [] if kind == "vit" or (own and kind == "gpt2") else ["model.sequence=16"]
        job = [*model, *data, "data.source=synthetic", "batch.samples=8", "validation.samples=8"]
        sets = [part for setting in (*job, "precision=float64") for part in ("--set", setting)]
        layout = f"{'replicate' if kind == 't5' else 'pipeline'}=2 shard=2 tensor=2 micro_batch=1"
        row: dict[str, Any] = {"layout": layout}
        (place / "job.toml").write_text("")
        for column, text in (("one", "shard=1"), ("product", layout)):
            against = ["--against", "hf"] if own and column == "one" else ["--layout", text]
            result = json.loads(shardwise("verify", str(place / "job.toml"), *sets, *against, "--json"))
            keys = ("logits", "gradient") if "logits" in result else ("loss", "grad_norm", "grad", "weight")
            row[column] = max(result[key] for key in keys)
            assert result["ok"], result
        run, out_folder = place / "run", place / "out"
        steps = ["--set", "steps=3", "--set", f"run.folder={run}", "--set", f"layout={layout}"]
        shardwise("train", str(place / "job.toml"), *sets, *steps)
        told = shardwise("export", str(run), str(out_folder), "--check", "--dtype", "float64")
        row["export"] = float(re.findall(r"by (\S+)\.$", told, re.MULTILINE)[-1])
        still = (*job, "optimizer.lr=0", "steps=1", f"run.folder={place / 'still'}", f"layout={layout}")
        still = [part for setting in still for part in ("--set", setting)]
        shardwise("train", str(place / "job.toml"), *still)
        shardwise("export", str(place / "still"), str(place / "same"))
        row["same"] = same_bits(place / "base", place / "same")
        return row


def same_bits(one: Path, other: Path) -> str:
    import torch
    from safetensors.torch import load_file

    tensors: list[dict[str, Any]] = [{}, {}]
    for found, folder in zip(tensors, (one, other), strict=True):
        for file in folder.glob("*.safetensors"):
            found |= load_file(file)
    names = tensors[0].keys() ^ tensors[1].keys()
    if names:
        return f"other names: {sorted(names)[:3]}"
    differ = [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])]
    return f"differs: {differ[:3]}" if differ else f"{len(tensors[0])} tensors"


def write_page(results: dict[str, Any]) -> None:
    lines = []
    for key, row in results.items():
        kind, _, road = key.partition("+")
        name, runs_as = FAMILIES[kind][0], "our decoder" if road else "transformers' module"
        if "error" in row:
            lines.append(f"| {name} | {runs_as} | {row['error']} | | | | |")
            continue
        errors = [f"{row[column]:.0e}" for column in ("one", "product", "export")]
        layout = row["layout"].removesuffix(" micro_batch=1")
        lines.append(f"| {name} | {runs_as} | {errors[0]} | {errors[1]} | `{layout}` | {errors[2]} | {row['same']} |")
    PAGE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("weights_matrix.json"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    keys = [key for kind in TYPES for key in ([kind, f"{kind}+own"] if kind in OWN_DECODER else [kind])]
    chosen = [key for key in keys if not args.only or key.partition("+")[0] in args.only.split(",")]
    for key in [] if args.page else chosen:
        kind, _, road = key.partition("+")
        try:
            results[key] = run_family(kind, bool(road))
        except Exception as error:  # noqa: BLE001 - the table shows it
            results[key] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(key, results[key], flush=True)
        args.results.write_text(json.dumps(results, indent=1))
    write_page({key: results[key] for key in keys if key in results})


if __name__ == "__main__":
    main()
