"""Text from a trained run, on one device."""

from __future__ import annotations

import numpy as np
import torch

from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import CheckpointError
from shardwise.job import Job
from shardwise.models.chain import Chain
from shardwise.parallel.parallelize import build
from shardwise.train.checkpoint import load_weights
from shardwise.train.folder import RunFolder


def load_model(folder: RunFolder, job: Job, device: torch.device) -> Chain:
    """The whole model with the weights of the newest good checkpoint."""
    model = build(job, torch.float32).to_empty(device=device)
    model.tie()
    if not load_weights(folder.checkpoints, dict(model.named_weights())):
        raise CheckpointError(f"{folder.path} has no checkpoint to take weights from; train it first.")
    return model.eval()


@torch.no_grad()
def generate(
    model: Chain, tokenizer: Tokenizer, prompt: str, count: int, sequence: int, temperature: float, seed: int
) -> str:
    """`count` more tokens after `prompt`; with temperature 0 always the likeliest."""
    device = next(model.parameters()).device
    chance = torch.Generator(device="cpu").manual_seed(seed)
    start = tokenizer.encode(prompt)
    tokens = [int(token) for token in start] or [0]
    for _ in range(count):
        window = torch.tensor([tokens[-sequence:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature <= 0:
            tokens.append(int(logits.argmax()))
        else:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=chance)))
    return tokenizer.decode(np.array(tokens[-count:] if not len(start) else tokens))
