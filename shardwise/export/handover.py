"""`shardwise export` and `merge`: the Hugging Face folder, and beside it what the next one in line needs: model card,
proof, data profile, reference sample (docs/how-to/hand-over.md).

Gates (`[export.gates]` of the job, and --gate) refuse the export before anything is written."""

import hashlib
import json
import operator
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise import __version__
from shardwise.console import fill_in
from shardwise.data.sample_stream import job_stream
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer
from shardwise.errors import DataError, JobError, RunError
from shardwise.export.drift import profile_data
from shardwise.export.smoke import greedy_tokens, logits_checksum
from shardwise.files import parse_json, write_text
from shardwise.job import ExportConfig
from shardwise.metrics.trackers import numbers_of
from shardwise.models.chain import IGNORE_INDEX
from shardwise.parallel.prepare import forward_flops
from shardwise.train.checkpoint_folder import read_manifest
from shardwise.train.dcp_storage import dtype_name
from shardwise.train.export import PROGRAM, Export, export_run
from shardwise.train.generate import LocalDecoder, load_run_tokenizer
from shardwise.train.run_folder import RunFolder

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
ASSETS = Path(__file__).parent / "assets"
WATTS = {"GPU": 700, "CPU": 65}  # per process
PROMPT_TOKENS, GREEDY_TOKENS, PROFILED_SAMPLES = 16, 16, 32


def hand_over(run: Path, out: Path, step: str, dtype: str, max_file_bytes: int, check: bool, merge: bool,
              gates: Sequence[str]) -> Iterator[str]:  # fmt: skip
    """Exports a run with everything beside the weights. Yields what was done, in sentences."""
    folder = RunFolder.open(run)
    conditions = folder.job().export.conditions() | _parse_gates(gates)
    before = lambda export: check_gates(folder, export.step, conditions)  # noqa: E731
    after = lambda export, place, checked: _write_beside(folder, export, place, checked, merge)  # noqa: E731
    return export_run(run, out, step, dtype, max_file_bytes, check, merge, before, after)


def _parse_gates(gates: Sequence[str]) -> dict[str, tuple[str, float]]:
    found: dict[str, tuple[str, float]] = {}
    for gate in gates:
        name, _, condition = gate.strip().partition(" ")
        try:
            found |= ExportConfig(gates={name: condition}).conditions()
        except ValueError:
            raise JobError(f'--gate {gate!r} is no condition; write for example "validation.loss <= 2.1".') from None
    return found


def measured(folder: RunFolder, step: int) -> dict[str, float]:
    """Returns the metrics of a step and of the newest validation up to it."""
    values: dict[str, float] = {}
    for record in folder.metrics():
        if record.get("step", 0) <= step:
            values = {key: value for key, value in values.items() if key.startswith("validation")} | numbers_of(record)
    return values


def check_gates(folder: RunFolder, step: int, conditions: dict[str, tuple[str, float]]) -> None:
    """Raises RunError if a metric of the run falls short."""
    values = measured(folder, step)
    for name, (comparison, bound) in conditions.items():
        if name not in values:
            raise RunError(f"nothing is exported: the run has no {name} up to step {step}, which a gate asks for.")
        if not COMPARE[comparison](values[name], bound):
            found = f"{name} is {values[name]:.6g} at step {step}"
            raise RunError(f"nothing is exported: {found}, but a gate asks for {comparison} {bound:g}.")


def _write_beside(folder: RunFolder, export: Export, out: Path, checked: str, merge: bool) -> str:
    job, told = folder.job(), ""
    tokenizer: Tokenizer | None = None
    with suppress(DataError):
        tokenizer = load_run_tokenizer(folder, job) if job.model.sample_kind == "tokens" else None
    if isinstance(tokenizer, ByteTokenizer) and job.model.is_causal_lm:
        (out / "tokenizer.json").write_bytes((ASSETS / "bytes-tokenizer.json").read_bytes())
    if tokenizer is not None:
        _write_tokenizer_config(out, tokenizer, job.model.sequence_length)
    try:
        columns, problem = profile_data(job, tokenizer), ""
    except (DataError, JobError) as error:  # the data is elsewhere, or the model brings its own
        columns, problem = {}, str(error)
    tokens = {"name": "gpt", "vocab": max(2, job.model.vocab_size), "sequence": job.model.text_window}
    model = tokens if job.model.sample_kind == "tokens" else job.model.model_dump(exclude={"weights", "lora"})
    data = job.data.model_dump(include={"source", "text_field", "on_bad_record"})
    data |= {"source": "text"} if job.data.mix else {}
    profile = {"version": 1, "model": model, "data": data, "columns": columns, "problem": problem}
    if checked and (out / "config.json").exists() and (job.model.is_causal_lm or job.model.targets_are_text):
        decoder = LocalDecoder(export.load(torch.float32), export.job.model)
        told = _write_reference(folder, decoder, out, tokenizer)
        profile["quantiles"], profile["samples"] = _loss_quantiles(folder, decoder)
    write_text(out / "data-profile.json", json.dumps(profile))
    facts = _facts(folder, export, merge) | {"problem": problem}
    write_text(out / "README.md", fill_in(ASSETS / "card.md", facts) + "\n")
    if not (out / PROGRAM).exists():  # of which MLflow knows nothing
        write_text(out / "MLmodel", fill_in(ASSETS / "MLmodel", facts) + "\n")
    hashed = [path for path in sorted(out.iterdir()) if path.suffix in (".safetensors", ".json", ".pt2")]
    data_files = {name: [file.size, file.digest] for name, file in folder.data_record().files.items()}
    proof = {"run": folder.path.name, "step": export.step, "layout": facts["layout"], "processes": facts["world"],
             "checked": checked or "no: exported without --check", "smoke_test": told or "no: exported without --check",
             "versions": {name: _version(name) for name in ("shardwise", "torch", "transformers", "tokenizers")},
             "python": sys.version.split()[0], "job_sha256": _sha256(folder.path / "job.toml"),
             "sha256": {path.name: _sha256(path) for path in hashed}, "data_bytes_and_hashes": data_files,
             "gates": job.export.gates, **{k: facts[k] for k in ("layouts", "metrics")}}  # fmt: skip
    write_text(out / "proof.json", json.dumps(proof, indent=1) + "\n")
    return f"{told}\nno data profile: {problem}" if problem else told


def _write_tokenizer_config(out: Path, tokenizer: Tokenizer, length: int) -> None:
    """Writes what transformers' AutoTokenizer needs beside our tokenizer.json, and its end token to the config."""
    if (out / "tokenizer_config.json").exists() or not (out / "tokenizer.json").exists():
        return
    added = parse_json((out / "tokenizer.json").read_bytes()).get("added_tokens") or ()
    end = next((token["content"] for token in added if token["id"] == tokenizer.eos_id), None)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": length}
    write_text(out / "tokenizer_config.json", json.dumps(values, indent=1) + "\n")
    if (config := out / "config.json").exists():
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id}
        write_text(config, json.dumps(parse_json(config.read_bytes()) | ends, indent=2) + "\n")


@torch.no_grad()
def _loss_quantiles(folder: RunFolder, decoder: LocalDecoder) -> tuple[dict[str, list[float]], str]:
    """Returns 21 quantiles of the loss and of the entropy of the model's predictions, over the tokens of held-out
    samples, or of training samples if none are held out; and which of the two."""
    job = folder.job()
    if job.loss.dpo_beta:
        return {}, "none"
    job = job.model_copy(update={"data": job.data.model_copy(update={"pack": False})})
    try:
        training, held_out, _ = folder.sources(job)
    except (DataError, JobError):  # the data is elsewhere
        return {}, "none"
    source = held_out if len(held_out) else training
    samples = job_stream(job, source, shuffle=False).read(np.arange(min(PROFILED_SAMPLES, len(source))))
    losses, entropies = [], []
    for tokens, targets in zip(samples.tokens, samples.targets):
        counts = targets != IGNORE_INDEX
        log_probs = decoder.logits(tokens.unsqueeze(0))[0, counts].float().log_softmax(-1)
        losses.append(-log_probs.gather(1, targets[counts].unsqueeze(1)).squeeze(1))
        entropies.append(-(log_probs.exp() * log_probs).sum(1))
    quantiles = {name: np.quantile(torch.cat(values).numpy(), np.linspace(0.0, 1.0, 21)).tolist()
                 for name, values in (("loss", losses), ("entropy", entropies))}  # fmt: skip
    return quantiles, "held-out" if len(held_out) else "training"


@torch.no_grad()
def _write_reference(folder: RunFolder, decoder: LocalDecoder, out: Path, tokenizer: Tokenizer | None) -> str:
    """Writes the reference sample; raises RunError unless a fresh process gets the same from the folder."""
    prompt = [token * 7 % decoder.config.vocab_size for token in range(PROMPT_TOKENS)]
    with suppress(DataError, JobError):
        prompt = [int(token) for token in folder.sources(folder.job())[0][0][:PROMPT_TOKENS]]
    prompt = prompt[: max(1, decoder.length - GREEDY_TOKENS)]
    count = min(GREEDY_TOKENS, decoder.length - len(prompt))
    greedy = greedy_tokens(lambda rows: decoder.last_logits(rows)[0], prompt, count)
    values = {"prompt_ids": prompt, "logits_checksum": logits_checksum(decoder.logits(torch.tensor([prompt]))),
              "greedy_ids": greedy, "text": tokenizer.decode(greedy) if tokenizer else ""}  # fmt: skip
    write_text(out / "reference.json", json.dumps(values, indent=1) + "\n")
    command = [sys.executable, "-m", "shardwise.export.smoke", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RunError(f"a fresh process does not get the reference sample: {done.stderr.strip()[-500:]}")
    return "smoke test: a fresh process loads it, with the reference logits and greedy text."


def _facts(folder: RunFolder, export: Export, merge: bool) -> dict[str, Any]:
    """Returns what the card and MLmodel say."""
    job, manifest, files = folder.job(), read_manifest(export.checkpoint), folder.data_record()
    records = [record for record in folder.metrics() if record.get("step", 0) <= export.step]
    resumes = [event for event in folder.events() if event.get("step", export.step) < export.step and "layout" in event]
    layouts = [layout for layout, _ in groupby([*(event["layout"] for event in resumes), manifest["layout"]])]
    hours = sum(record.get("seconds", 0.0) for record in records) / 3600
    watts = WATTS["GPU" if records and "mfu" in records[-1] else "CPU"]
    family, model, is_whole = export.job.family, export.job.model, export.lora is None or merge
    has_config = is_whole and family.has_huggingface_form(model)
    config = family.export_config(model) if has_config else {"architectures": ["program"]} if is_whole else {}
    architecture = (config.get("architectures") or ["PeftModel"])[0]
    return {"name": folder.path.resolve().name, "job": job, "step": export.step, "dtype": dtype_name(export.dtype),
            "architecture": architecture, "library": "pytorch" if is_whole and not has_config else "transformers",
            "is_lm": job.model.is_causal_lm or architecture.endswith(("CausalLM", "LMHeadModel")),
            "parameters": sum(weight.numel() for _, weight in export.model.named_unique_parameters()),
            "files": [(Path(name).name, file.size) for name, file in files.files.items()], "samples": files.samples,
            "layout": manifest["layout"], "layouts": layouts, "world": int(manifest["world"]), "hours": hours,
            "watts": watts, "flops": 3 * sum(forward_flops(job.model)) * (export.step * job.samples),
            "metrics": measured(folder, export.step), "transformers": _version("transformers"),
            "uuid": uuid.uuid4().hex, "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")}  # fmt: skip


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return __version__ if package == "shardwise" else version(package)
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
