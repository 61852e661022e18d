"""`shardwise verify --against hf`: our model against transformers' module with the same weights, in float64."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.module_chain import KeepFloat64
from shardwise.errors import JobError
from shardwise.job import Job
from shardwise.models.chain import init_weights
from shardwise.models.pretrained import ModuleWeights
from shardwise.train.local_machine import require_memory

TOLERANCE = 1e-10
GRADIENT_FLOOR = 1e-6  # norm below which a gradient is compared absolutely


@dataclass(frozen=True)
class TransformersComparison:
    """Relative differences from transformers' module."""

    module: str
    logits: float
    gradient: float
    parameter: str  # whose gradient differs most
    count: int  # parameters compared

    @property
    def ok(self) -> bool:
        return max(self.logits, self.gradient) <= TOLERANCE

    def text(self) -> str:
        worst = "" if self.ok else f" ({self.parameter})"
        return (
            f"{'exact' if self.ok else 'DIFFERS'}: against transformers' {self.module} in float64, logits differ by "
            f"{self.logits:.1e}, gradients of {self.count} parameters by at most {self.gradient:.1e}{worst}"
        )


def compare_with_transformers(job: Job, samples: int = 2) -> TransformersComparison:
    """Compares every logit and every gradient, on random tokens and weights."""
    require_memory(job, 40)  # bytes per parameter: two models and their gradients in float64
    reference = job.family.reference(job.model)
    if reference is None:
        which = f"{job.model.description} of this shape, or it is not installed"
        raise JobError(f"transformers has no module for {which}; decoders in the form of Llama or GPT-2 have one.")
    ours = job.family.build(job.model, job.seed).double().eval()
    init_weights(ours, job.seed)
    generator = torch.Generator().manual_seed(job.seed)
    with torch.no_grad():
        for weight in ours.parameters():  # biases and norms too, which start at 0 and 1
            weight.add_(0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=generator))
        named = dict(reference.named_parameters())
        for name, value in _in_module(job, reference, dict(ours.named_unique_parameters())).items():
            named[name].copy_(value)
    tokens = torch.randint(0, job.model.vocab_size, (samples, job.model.sequence_length), generator=generator)
    logits = ours(tokens, ids=torch.arange(samples))
    with KeepFloat64():
        expected = reference(tokens).logits
    for found in (logits, expected):
        F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    differences = {}
    gradients = {name: weight.grad for name, weight in ours.named_unique_parameters() if weight.grad is not None}
    for name, gradient in _in_module(job, reference, gradients).items():
        theirs = named[name].grad
        assert theirs is not None, f"{name} has no gradient"
        differences[name] = float((gradient - theirs).norm() / theirs.norm().clamp(min=GRADIENT_FLOOR))
    worst = max(differences, key=lambda name: differences[name])
    difference = float((logits - expected).detach().norm() / expected.detach().norm())
    return TransformersComparison(type(reference).__name__, difference, differences[worst], worst, len(differences))


def _in_module(job: Job, reference: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights or gradients of ours under the names and in the shapes of the reference, all of them."""
    found = ModuleWeights(job.family.export_weights(job.model, tensors), reference)
    names = [name for name, _ in reference.named_parameters()]
    if missing := [name for name in names if name not in found.found] or sorted(found.unused):
        raise JobError(f"{type(reference).__name__} and our model differ in the parameters {', '.join(missing)}.")
    everything = (slice(None),) * 3
    return {name: found.value(name)[everything[: len(found.value(name).shape)]] for name in names}
