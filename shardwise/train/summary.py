"""What is said when a run has ended: how good the model is, what it writes, where the run lies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shardwise.data.make import make_sources
from shardwise.data.source import Source
from shardwise.data.tokenizer import Tokenizer
from shardwise.job import Job
from shardwise.train.folder import RunFolder
from shardwise.train.generate import generate, load_model
from shardwise.train.validate import byte_frequency_bits

SAMPLES = 512  # training samples whose bytes are counted for the frequency table


def finished(folder: RunFolder) -> bool:
    """Whether the last thing that happened to a run was its end."""
    return next((event["event"] for event in reversed(list(folder.events()))), "") == "finished"


def summarize(folder: RunFolder, job: Job, say: Callable[[str], None]) -> None:
    """For a run that took all its steps."""
    training, held_out, tokenizer = make_sources(job)
    verdict = next((event for event in reversed(list(folder.events())) if event["event"] == "validation"), None)
    if verdict is not None and tokenizer is not None:
        spread = np.linspace(0, len(training) - 1, min(SAMPLES, len(training))).astype(int)
        same = np.arange(min(job.validation.samples, len(held_out)))  # the samples that the model was tried on
        table = byte_frequency_bits(_text(training, tokenizer, spread), _text(held_out, tokenizer, same))
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


def _text(source: Source, tokenizer: Tokenizer, places: np.ndarray) -> bytes:
    return b"".join(tokenizer.decode(source[int(place)]).encode("utf-8", "replace") for place in places)
