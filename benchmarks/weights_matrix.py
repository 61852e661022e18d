"""Weights in and out, one tiny random model per family; writes `docs/reference/weights.md`.

    python benchmarks/weights_matrix.py                        all families, about a quarter of an hour on two cores
    python benchmarks/weights_matrix.py --only llama,t5        these; the others keep their results
    python benchmarks/weights_matrix.py --missing              those without a result
    python benchmarks/weights_matrix.py --page                 only write the page from existing results

A folder that transformers saved is (1) verified against `from_pretrained` of it, in one process and in a product of
three axes, (2) trained for 3 steps in that layout in float64, exported with `--check`, (3) trained for one step with a
learning rate of 0 and exported, which must give every tensor back bit by bit. Each family runs in a process of its own,
which calls what `shardwise verify`, `train` and `export` call.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers_matrix import FAMILIES, config_args

from shardwise.comm.world import run_world
from shardwise.job import load_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train.export import export_run
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import name_step
from shardwise.verify.command import compare_with_transformers
from shardwise.verify.parity import verify

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "weights.md"
OWN_DECODER = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2")
SETS = {"mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}, "qwen3_moe": {"norm_topk_prob": True}}
TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "olmo2", "olmo3",
         "phi3", "gpt_neox", "cohere", "cohere2", "glm4", "smollm3", "granite", "gpt_oss", "deepseek_v3", "gpt2",
         "bert", "t5", "vit")  # fmt: skip
# Three axes that transformers' modules of these types support.
LAYOUTS = {"t5": "replicate=2 shard=2 tensor=2", "gpt2": "pipeline=2 shard=2 context=2"}
FILE_BYTES = 60_000  # several files per model
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


def in_new_process(kind: str, own: bool) -> dict[str, Any]:
    """Returns what `run_family` returns, or its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(run_family(kind, own))
        except BaseException as error:  # noqa: BLE001 - the table shows it
            sender.send({"error": f"{type(error).__name__}: {str(error)[:300]}"})

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        result = {"error": "the process ended without a result"}
    process.join()
    return result


def train_rank(path: str, layout: str) -> None:
    folder = RunFolder(Path(path))
    TrainingLoop(prepare(folder.job(), Layout.parse(layout)), folder, torch.device("cpu")).run()


def train(settings: list[str], run: Path, layout: str) -> Path:
    job = load_job(None, [*settings, f"run.folder={run}", f"layout={layout}"])
    folder = RunFolder.create(name_step(job))
    run_world(train_rank, Layout.parse(layout).world, str(folder.path), layout, timeout=900.0)
    return folder.path


def save_folder(kind: str, folder: Path) -> None:
    """Saves a random model, in several files."""
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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        save_folder(kind, place / "base")
        model = f"model.weights={place / 'base'}" if own else f"model.name=hf:{place / 'base'}"
        sequence = [] if kind == "vit" or (own and kind == "gpt2") else ["model.sequence=16"]
        settings = [model, *sequence, "data.source=synthetic", "batch.samples=8", "validation.samples=8"]
        layout = LAYOUTS.get(kind, "pipeline=2 shard=2 tensor=2") if not own else "pipeline=2 shard=2 tensor=2"
        layout += " micro_batch=1"
        job = load_job(None, [*settings, "precision=float64"])
        row: dict[str, Any] = {"layout": layout}
        for column, text in (("one", "shard=1"), ("product", layout)):
            if own and column == "one":
                result: Any = compare_with_transformers(job)
                row[column] = max(result.logits, result.gradient)
            else:
                (result,) = verify(job, [Layout.parse(text)])
                row[column] = max(result.loss, result.grad_norm, result.grad, result.weight)
            assert result.ok, result
        run = train([*settings, "precision=float64", "steps=3"], place / "run", layout)
        told = list(export_run(run, place / "out", None, "float64", FILE_BYTES, check=True))[-1]
        row["export"] = float(re.findall(r"by (\S+)\.$", told)[-1])
        still = train([*settings, "optimizer.lr=0", "steps=1"], place / "still", layout)
        list(export_run(still, place / "same", None, "auto", FILE_BYTES))
        row["same"] = same_bits(place / "base", place / "same")
        return row


def same_bits(one: Path, other: Path) -> str:
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
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("weights_matrix.json"))
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    keys = [key for kind in TYPES for key in ([kind, f"{kind}+own"] if kind in OWN_DECODER else [kind])]
    chosen = [key for key in keys if not args.only or key.partition("+")[0] in args.only.split(",")]
    chosen = [key for key in chosen if not (args.missing and key in results)]
    for key in [] if args.page else chosen:
        kind, _, road = key.partition("+")
        results[key] = in_new_process(kind, bool(road))
        print(key, results[key], flush=True)
        args.results.write_text(json.dumps(results, indent=1))
    write_page({key: results[key] for key in keys if key in results})


if __name__ == "__main__":
    main()
