"""What is said when a run has ended: how good the model is, what it writes, where the run lies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from shardwise.data.make import make_sources
from shardwise.job import Job
from shardwise.train.folder import RunFolder
from shardwise.train.generate import generate, load_model
from shardwise.train.loop import cache_folder
from shardwise.train.validate import byte_frequency_bits

SAMPLES = 512  # training samples whose bytes are counted for the frequency table


def last_event(folder: RunFolder, kind: str) -> dict[str, Any] | None:
    path = folder.path / "events.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((record for record in reversed(records) if record["event"] == kind), None)


def summarize(folder: RunFolder, job: Job, say: Any) -> None:
    """For a run that took all its steps."""
    training, held_out, tokenizer = make_sources(job, cache_folder())
    verdict = last_event(folder, "validation")
    if verdict is not None and tokenizer is not None:
        seen, unseen = _text(training, tokenizer, SAMPLES), _text(held_out, tokenizer, job.validation.samples)
        table = byte_frequency_bits(seen, unseen)
        bits = verdict["bits_per_byte"]
        say(f"validation: {bits:.3f} bits per byte (a table of byte frequencies reaches {table:.3f})")
    elif verdict is not None:
        say(f"validation: loss {verdict['loss']:.4f}")
    if tokenizer is not None:
        model = load_model(folder, job, torch.device("cpu"))
        prompt = "def "
        text = generate(model, tokenizer, prompt, 160, job.model.sequence, temperature=0.7, seed=job.seed)
        say(f"a sample of what it writes after {prompt!r}:")
        say("\n".join(f"  | {line}" for line in text.splitlines()))
    say(f"run folder: {folder.path}")
    say(f"more text:  shardwise sample {folder.path} --prompt 'import '")


def _text(source: Any, tokenizer: Any, count: int) -> bytes:
    places = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)
    return b"".join(tokenizer.decode(source[int(place)]).encode("utf-8", "replace") for place in places)
