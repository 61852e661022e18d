"""The summary of a finished run: a baseline for its loss, a sample of generated text, the run folder."""

import shlex
from collections.abc import Callable

import numpy as np
import torch

from shardwise.data.sample_stream import SampleStream
from shardwise.data.source import Source
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import RunError
from shardwise.job import Job
from shardwise.train.generate import generate, load_model
from shardwise.train.run_folder import RunFolder
from shardwise.train.validate import byte_frequency_bits

FREQUENCY_SAMPLES = 512  # training samples whose bytes are counted for the frequency table


def has_finished(folder: RunFolder) -> bool:
    """Whether the run's last event is `finished`."""
    return next((event["event"] for event in reversed(list(folder.events()))), "") == "finished"


def summarize(folder: RunFolder, job: Job, say: Callable[[str], None]) -> None:
    """Prints the summary of a run that has taken all its steps."""
    training, held_out, tokenizer = folder.sources(job)
    if tokenizer is not None and len(held_out) and job.model.targets_are_text:
        bits = _frequency_table_bits(job, training, held_out, tokenizer)
        say(f"for comparison: predicting bytes by their frequency gives {bits:.3f} bits per byte")
    if tokenizer is not None and job.model.is_causal_lm:
        prompt_source = held_out if len(held_out) else training
        words = tokenizer.decode(prompt_source[0]).split()[1:4]  # not the first word, which may be cut off
        prompt = "def " if job.data.source == "stdlib" else " ".join(words)[:40]
        model = load_model(folder, job, torch.device("cpu"))
        try:
            text = generate(model, tokenizer, prompt, 160, job.require_decoder(), temperature=0.7, seed=job.seed)
        except RunError as error:
            text = str(error)
        say(f"generated text after {prompt!r}:")
        say("\n".join(f"  | {line}" for line in text.splitlines()))
        say(f"for more: shardwise sample {folder.path} --prompt {shlex.quote(prompt)}")
    say(f"run folder: {folder.path}")


def _frequency_table_bits(job: Job, training: Source, held_out: Source, tokenizer: Tokenizer) -> float:
    indices = np.linspace(0, len(training) - 1, min(FREQUENCY_SAMPLES, len(training))).astype(int)
    # The samples that validation used.
    positions = np.arange(min(job.validation.samples, len(held_out)))
    validation_indices = SampleStream(held_out, job.seed, shuffle=False).indices(positions)
    validation_texts = _decode_samples(held_out, tokenizer, validation_indices)
    return byte_frequency_bits(_decode_samples(training, tokenizer, indices), validation_texts)


def _decode_samples(source: Source, tokenizer: Tokenizer, indices: np.ndarray) -> bytes:
    return b"".join(tokenizer.decode(source[int(index)]).encode("utf-8", "replace") for index in indices)
