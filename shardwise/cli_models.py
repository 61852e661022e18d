"""The commands on trained models: sample, eval, export, merge, drift."""

import os
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from shardwise import quick_import
from shardwise.cli_options import JsonFlag, Overrides
from shardwise.console import print_line
from shardwise.files import require_parent_folder

StepOption = Annotated[str, Option(help="Checkpoint: a step, or best; default: the newest.")]


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
    step: StepOption = "",
    batch: Annotated[int, Option(min=1, help="Rows that are computed at once.")] = 8,
    overrides: Overrides = None, as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Evaluates a model on files and tasks: perplexity, multiple choice, exact match, metrics of your own."""
    module = quick_import("shardwise.eval.tasks")

    found = module.evaluate(path, data or [], tasks or [], layout, step, overrides or [], batch)
    if os.environ.get("RANK", "0") == "0":
        for line in [module.results_json(found)] if as_json else module.results_text(found):
            print_line(line)


DtypeOption = Annotated[str, Option(help="float32, bf16, fp16 or float64; auto: as the run's first weights.")]
ShardSize = Annotated[float, Option(min=0.001, help="Size of the largest weight file, in GB.")]
CheckFlag = Annotated[bool, Option("--check", help="Load it with transformers and compare; write a reference sample.")]
Gates = Annotated[list[str] | None, Option("--gate", help='Condition, e.g. "validation.loss <= 2.1"; repeatable.')]
OutFolder = Annotated[Path, Argument(help="Folder to write; it must not exist.")]


def export(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint.")], out: OutFolder, step: StepOption = "",
    dtype: DtypeOption = "auto", max_shard_size: ShardSize = 5.0, check: CheckFlag = False, gate: Gates = None,
) -> None:  # fmt: skip
    """Writes a run as a folder that transformers loads, with model card, proof and data profile."""
    _hand_over(run, out, step, dtype, max_shard_size, check, gate, merges=False)


def merge(
    run: Annotated[Path, Argument(help="Run folder with a checkpoint of adapters (model.lora).")], out: OutFolder,
    step: StepOption = "", dtype: DtypeOption = "auto", max_shard_size: ShardSize = 5.0, check: CheckFlag = False,
    gate: Gates = None,
) -> None:  # fmt: skip
    """Adds the adapters of a run to the weights that it started from, and writes a folder that transformers loads."""
    _hand_over(run, out, step, dtype, max_shard_size, check, gate, merges=True)


def _hand_over(
    run: Path, out: Path, step: str, dtype: str, gigabytes: float, check: bool, gates: list[str] | None, merges: bool
) -> None:
    hand_over = quick_import("shardwise.export.handover").hand_over

    for sentence in hand_over(run, out, step, dtype, int(gigabytes * 1e9), check, merges, gates or []):
        print_line(sentence)


def drift(
    profile: Annotated[Path, Argument(help="The data-profile.json of an export.")],
    new: Annotated[str, Argument(help="New data: a file or folder of the same kind, or another profile (.json).")],
    threshold: Annotated[float, Option(min=0.0, help="PSI above which a column counts as moved.")] = 0.1,
    page: Annotated[Path | None, Option("--html", help="Write a page with the histograms side by side.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compares new data with the profile of the training data, column by column; exits with 1 if one has drifted."""
    module = quick_import("shardwise.export.drift")

    require_parent_folder(page)
    found = module.drift(profile, new, threshold, page)
    print_line(module.drift_json(found) if as_json else module.drift_text(found))
    if any(column.drifted for column in found):
        raise Exit(1)


COMMANDS: dict[str, Any] = {"sample": sample, "eval": evaluate, "export": export, "merge": merge, "drift": drift}
