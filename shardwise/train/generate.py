"""Generates text from a trained run, on one device."""

from pathlib import Path

import numpy as np
import torch

from shardwise.data.sample_stream import Samples
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.errors import CheckpointError, DataError, JobError, RunError
from shardwise.job import Job
from shardwise.models.chain import Chain, init_slice
from shardwise.models.gpt_family import DecoderConfig
from shardwise.train.checkpoint import load_weights
from shardwise.train.local_machine import pick_device, require_memory
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import use_run_weights


def sample_run(run: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Returns the text that `shardwise sample` prints."""
    if not temperature >= 0:
        raise JobError(f"--temperature {temperature}: it must be 0 or more.")
    folder = RunFolder.open(run, weights=True)
    job = folder.job()
    decoder = job.require_decoder()
    tokenizer = load_run_tokenizer(folder, job)
    model = load_model(folder, job, torch.device(pick_device(job)))
    return generate(model, tokenizer, prompt, tokens, decoder, temperature, seed)


def load_run_tokenizer(folder: RunFolder, job: Job) -> Tokenizer:
    """Returns the tokenizer of a run; raises DataError if it has none."""
    if folder.tokenizer.exists():
        return load_tokenizer(str(folder.tokenizer))
    if job.data.source not in ("tokens", "synthetic"):
        return load_tokenizer(job.data.tokenizer)
    _, _, tokenizer = folder.sources(job)
    if tokenizer is None:
        raise DataError(
            f"{folder.path} was trained on tokens without a tokenizer (data.source = {job.data.source!r}), so it "
            f"cannot generate text; if you have the tokenizer, save it there as {folder.tokenizer.name}."
        )
    return tokenizer


def load_model(folder: RunFolder, job: Job, device: torch.device) -> Chain:
    """Returns the unsharded model with the weights of the newest valid checkpoint."""
    require_memory(job, 4)
    model = job.family.build_on_meta(job.model, job.seed).to_empty(device=device)
    model.tie_weights()
    if not load_trained_weights(folder, model):
        raise CheckpointError(f"{folder.path} has no checkpoint to load weights from; train it first.")
    return model.eval()


@torch.no_grad()
def load_trained_weights(folder: RunFolder, model: Chain) -> bool:
    """Loads the newest checkpoint, and initial values where nothing is trained; returns whether there is one."""
    job, weights = folder.job(), dict(model.named_unique_parameters())
    use_run_weights(job, model)
    for name, weight in weights.items():
        if not weight.requires_grad:
            init_slice(model, name, weight, weight.shape, (0,) * weight.dim(), job.seed)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    return load_weights(folder.checkpoints, trained) is not None


@torch.no_grad()
def generate(
    model: Chain, tokenizer: Tokenizer, prompt: str, count: int, config: DecoderConfig, temperature: float, seed: int
) -> str:
    """Returns the prompt with `count` more tokens; temperature 0 is greedy decoding."""
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    prompt_tokens = tokenizer.encode(prompt)
    tokens = [int(token) for token in prompt_tokens] or [0]
    for _ in range(count):
        window = torch.tensor([tokens[-config.sequence :]], device=device)
        samples = Samples(window, window, torch.zeros(1, dtype=torch.int64, device=device))
        logits = model(window, **samples.with_document_ids(config.eod_token_id).forward_kwargs)[0, -1].float().cpu()
        if not logits.isfinite().all():
            raise RunError("the model's logits are not finite, so it cannot generate text; check the run's loss.")
        if temperature <= 0:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return tokenizer.decode(np.array(tokens[-count:] if not len(prompt_tokens) else tokens))
