"""Generates text from a trained run, on one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.sample_stream import Samples
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.errors import DataError, JobError, RunError
from shardwise.job import Job
from shardwise.models.chain import Chain
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import KeyValueCache
from shardwise.train.export import open_checkpoint
from shardwise.train.local_machine import pick_device, require_memory
from shardwise.train.run_folder import RunFolder


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen."""

    tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together have this probability
    stop: Sequence[str] = ()  # the text ends before any of these
    end_token: int = -1  # generation ends at this token, which is no part of the text
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and self.tokens >= 0):
            raise JobError("temperature and top-k must be 0 or more, and top-p above 0 and at most 1.")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Returns the next token, given its logits (V,)."""
        if not logits.isfinite().all():
            raise RunError("the model's logits are not finite, so it cannot generate text; check the run's loss.")
        if self.temperature <= 0:
            return int(logits.argmax())
        probabilities, order = (logits / self.temperature).softmax(-1).sort(descending=True, stable=True)
        keep = probabilities.cumsum(-1) - probabilities < self.top_p
        keep[self.top_k or len(keep) :] = False
        return int(order[torch.multinomial(probabilities * keep, 1, generator=generator)])


def sample_run(run: Path, prompts: Sequence[str], sampling: Sampling, device: str = "") -> list[str]:
    """Returns the texts that `shardwise sample` prints, one for each prompt."""
    folder = RunFolder.open(run, weights=True)
    job = folder.job()
    if not (job.model.passes_batch and job.model.targets_are_text):  # a module of transformers
        job.require_decoder()
    tokenizer = load_run_tokenizer(folder, job)
    require_memory(job, 4)
    model = open_checkpoint(folder).load(torch.float32).to(device or pick_device(job))
    ids = [[int(token) for token in tokenizer.encode(prompt)] or [0] for prompt in prompts]
    new = generate_texts(LocalDecoder(model, job.model), tokenizer, ids, sampling)
    return [prompt + text for prompt, text in zip(prompts, new)]


def load_run_tokenizer(folder: RunFolder, job: Job) -> Tokenizer:
    """Returns the tokenizer of a run; raises DataError if it has none."""
    if folder.tokenizer.exists():
        return load_tokenizer(str(folder.tokenizer))
    if job.data.source not in ("tokens", "synthetic"):
        return load_tokenizer(job.data.tokenizer)
    _, _, tokenizer = folder.sources(job)
    if tokenizer is None:
        problem = f"{folder.path} was trained on tokens without a tokenizer, so it cannot generate text"
        raise DataError(f"{problem}; if you have the tokenizer, save it there as {folder.tokenizer.name}.")
    return tokenizer


class TransformersCache:
    def __init__(self, model: Any):
        self.model, self.length, self.past = model, 0, None

    def __call__(self, tokens: Tensor) -> Tensor:
        output = self.model(input_ids=tokens, use_cache=True, past_key_values=self.past)
        self.length, self.past = self.length + tokens.shape[1], output.past_key_values
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.past = None


class LocalDecoder:
    """A decoder on one device: one of ours, or a module of transformers."""

    def __init__(self, model: Any, config: ModelConfig):
        self.model, self.config, self.length = model.eval(), config, config.sequence_length
        self.device = next(model.parameters()).device

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits (B, S, V) after every token of rows (B, S)."""
        if not isinstance(self.model, Chain):
            return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]
        samples = Samples(tokens, tokens, torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device))
        extra = samples.with_document_ids(self.config.document_separator).forward_kwargs
        return self.model(tokens, **extra)  # type: ignore[no-any-return]

    def last_logits(self, rows: Tensor) -> Tensor:
        """Returns the logits (B, V) after the last token of each row (B, S)."""
        return self.logits(rows)[:, -1]

    def open_cache(self, tokens: int) -> KeyValueCache | TransformersCache | None:
        """Returns a key-value cache for rows that get this long; None where the logits would change with it."""
        if tokens > self.length:
            return None
        if not isinstance(self.model, Chain):
            return TransformersCache(self.model)
        can_cache = KeyValueCache.supports(self.model, self.config)
        return KeyValueCache(self.model, self.config) if can_cache else None  # type: ignore[arg-type]


@torch.no_grad()
def generate_texts(decoder: Any, tokenizer: Tokenizer, prompts: Sequence[list[int]], sampling: Sampling) -> list[str]:
    """Returns the new text after each prompt. Prompts of one length are one batch, on which no text depends."""
    texts = [""] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        group = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        rows, done = [list(prompts[number]) for number in group], dict[int, str]()
        generators = [torch.Generator().manual_seed(sampling.seed + number) for number in group]
        cache = decoder.open_cache(length + sampling.tokens)
        for _ in range(sampling.tokens):
            new = torch.tensor([row[cache.length if cache else -decoder.length :] for row in rows])
            logits = (cache or decoder.last_logits)(new.to(decoder.device)).float().cpu()
            for place, row in enumerate(rows):
                row.append(sampling.choose(logits[place], generators[place]))
                if place not in done and (text := _finished(tokenizer, row[length:], sampling)) is not None:
                    done[place] = text
            if len(done) == len(rows):
                break
        if cache is not None:
            cache.close()
        for place, number in enumerate(group):
            texts[number] = done[place] if place in done else tokenizer.decode(np.array(rows[place][length:]))
    return texts


def _finished(tokenizer: Tokenizer, new: list[int], sampling: Sampling) -> str | None:
    """Returns the text of new tokens without its end, if it has one."""
    if new[-1] == sampling.end_token:
        return tokenizer.decode(np.array(new[:-1]))
    text = tokenizer.decode(np.array(new)) if sampling.stop else ""
    ends = [text.index(stop) for stop in sampling.stop if stop and stop in text]
    return text[: min(ends)] if ends else None
