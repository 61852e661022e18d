"""The commands on trained models: sample, eval, export, merge."""

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise import quick_import
from shardwise.cli_options import JsonFlag, Overrides
from shardwise.console import print_line


def sample(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint.")],
    prompt: Annotated[list[str] | None, Option(help="Text to continue; repeatable.")] = None,
    tokens: Annotated[int, Option(min=1, help="Number of tokens to generate.")] = 256,
    temperature: Annotated[float, Option(min=0.0, help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int, Option(min=0, help="Choose among the K most likely tokens; 0: among all.")] = 0,
    top_p: Annotated[float, Option(min=0.0, help="Choose among tokens that together have this probability.")] = 1.0,
    stop: Annotated[list[str] | None, Option(help="End the text before this string; repeatable.")] = None,
    seed: Annotated[int, Option(min=0, help="Sampling seed.")] = 0,
) -> None:
    """Generates text with the model of a run, on one device."""
    generate = quick_import("shardwise.train.generate")

    sampling = generate.Sampling(tokens, temperature, top_k, top_p, tuple(stop or ()), seed=seed)
    for text in generate.sample_run(run, prompt or [""], sampling):
        print_line(text)


def evaluate(
    path: Annotated[Path, Argument(metavar="RUN|FOLDER", help="Run folder, or a Hugging Face folder.")],
    data: Annotated[list[str] | None, Option(help="Text or JSONL file for the perplexity; repeatable.")] = None,
    tasks: Annotated[list[Path] | None, Option(help="Task file (YAML, as lm-eval's); repeatable.")] = None,
    layout: Annotated[str, Option(help='Layout, e.g. "tensor=2"; default: one process.')] = "",
    step: Annotated[str, Option(help="Checkpoint of the run: a step, or best; default: the newest.")] = "",
    batch: Annotated[int, Option(min=1, help="Rows that are computed at once.")] = 8,
    overrides: Overrides = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Evaluates a model on files and tasks: perplexity, multiple choice, exact match, metrics of your own."""
    found = quick_import("shardwise.eval.command").evaluate(
        path, data or [], tasks or [], layout, step, overrides or [], batch
    )
    from shardwise.eval.tasks import results_json, results_text

    if os.environ.get("RANK", "0") == "0":
        for line in [results_json(found)] if as_json else results_text(found):
            print_line(line)


def export(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint.")],
    out: Annotated[Path, Argument(help="Folder to write; it must not exist.")],
    step: Annotated[str, Option(help="Checkpoint to export: a step, or best; default: the newest.")] = "",
    dtype: Annotated[str, Option(help="float32, bf16, fp16 or float64; auto: as the run's first weights.")] = "auto",
    max_shard_size: Annotated[float, Option(min=0.001, help="Size of the largest weight file, in GB.")] = 5.0,
    check: Annotated[bool, Option("--check", help="Load it with transformers and compare every logit.")] = False,
) -> None:
    """Writes the weights of a run as a folder that transformers loads, with config and tokenizer."""
    export_run = quick_import("shardwise.train.export").export_run

    for sentence in export_run(run, out, step, dtype, int(max_shard_size * 1e9), check):
        print_line(sentence)


def merge(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint of adapters (model.lora).")],
    out: Annotated[Path, Argument(help="Folder to write; it must not exist.")],
    step: Annotated[str, Option(help="Checkpoint to merge: a step, or best; default: the newest.")] = "",
    dtype: Annotated[str, Option(help="float32, bf16, fp16 or float64; auto: as the run's first weights.")] = "auto",
    max_shard_size: Annotated[float, Option(min=0.001, help="Size of the largest weight file, in GB.")] = 5.0,
    check: Annotated[bool, Option("--check", help="Load it with transformers and compare every logit.")] = False,
) -> None:
    """Adds the adapters of a run to the weights that it started from, and writes a folder that transformers loads."""
    export_run = quick_import("shardwise.train.export").export_run

    for sentence in export_run(run, out, step, dtype, int(max_shard_size * 1e9), check, merge=True):
        print_line(sentence)


COMMANDS = {"sample": sample, "eval": evaluate, "export": export, "merge": merge}
