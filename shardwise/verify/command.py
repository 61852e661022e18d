"""`shardwise verify`, `shardwise inspect`, and the proof of a model that is not ours before its first step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.module_chain import KeepFloat64
from shardwise.cluster import GIB
from shardwise.console import Answer, fill_in, format_count, pluralize
from shardwise.errors import JobError, UserError
from shardwise.files import parse_toml
from shardwise.job import BatchConfig, GradientConfig, Job, load_job
from shardwise.layout import AXES, Layout
from shardwise.models.chain import init_weights
from shardwise.models.pretrained import ModuleWeights
from shardwise.parallel.prepare import Prepared, forward_flops, meta_model, prepare
from shardwise.train.local_machine import FORKED_PROCESS_BYTES, available_memory, require_memory
from shardwise.verify.parity import VerifyResult, relative_error, verify
from shardwise.verify.rounding import RUNS

LAYOUTS = parse_toml(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
TOLERANCE = 1e-10  # of the comparison with transformers
GRADIENT_FLOOR = 1e-6  # norm below which a gradient is compared absolutely
LARGE = 100_000_000  # parameters of a copy whose proof takes minutes
# Bytes of the proof per parameter, in float64: weight, gradient and Adam's two moments of the reference; those of a
# rank and its copies of gradients (measured); the record of weights and gradients of each step, twice on its way to the
# ranks.
REFERENCE_BYTES = 4 * 8
RANK_BYTES = 7 * 8
PROOF_STEPS = 3  # what the first step leaves behind is used by the second, and what that one changes by the third
RECORD_BYTES = 2 * (2 * 8 * PROOF_STEPS)
ERROR_NOTE = "The largest |difference| / |reference| of any tensor and step: rounding, if up to 1e-10 in float64."


def verify_job(job_file: Path | None, settings: list[str], layouts: list[str], shrink: bool, steps: int,
               show: Callable[[VerifyResult], None]) -> list[VerifyResult]:  # fmt: skip
    """Verifies the given layouts, or else the job's layout, or else every default layout that the job supports."""
    job = load_job(job_file, ["precision=float64", *settings])
    requested = layouts or ([job.layout] if job.layout != "auto" else [])
    selected = [Layout.parse(text) for text in requested or LAYOUTS[job.family.verify_layouts]]
    if job.model.lora is not None:  # with B at zero, most of its gradients would be zero too
        lora = job.model.lora.model_copy(update={"init_std": job.model.lora.init_std or 0.02})
        job = job.model_copy(update={"model": job.model.model_copy(update={"lora": lora})})
    if shrink:
        job = shrink_batch(shrink_model(job), selected)
    if not requested:
        selected = [layout for layout in selected if not _refusal(job, layout)]
    return verify(job, selected, steps, show)


def _refusal(job: Job, layout: Layout) -> str:
    """Returns why a job cannot run in a layout; empty if it can."""
    try:
        prepare(job, layout)
    except UserError as error:
        return str(error)
    return ""


def shrink_model(job: Job) -> Job:
    return job.model_copy(update={"model": job.family.shrink(job.model)})


def shrink_batch(job: Job, layouts: list[Layout], smallest: int = 16) -> Job:
    """Returns the job with the smallest batch that every layout can run, of at least `smallest` samples (16, 24, ...,
    1024), or unchanged."""
    for samples in range(smallest, min(job.samples, 1025), smallest // 2):
        small = job.model_copy(update={"batch": BatchConfig(samples=samples)})
        if not any(_refusal(small, layout) for layout in layouts):
            return small
    return job


def inspect_job(job: Job) -> dict[str, Any]:
    """Returns plain values: what was found, and for each axis "works" or why it does not."""
    chain: Any = meta_model(job.model, job.seed)
    weights = list(chain.named_unique_parameters())
    count = sum(weight.numel() for _, weight in weights)
    frozen = [name for name, weight in weights if not weight.requires_grad]
    found: dict[str, Any] = {"model": job.model.name, "parameters": f"{format_count(count)} in {len(weights)} tensors"}
    anatomy = getattr(chain, "anatomy", None)
    if anatomy is not None:
        prologue = [name for name, parts in anatomy.parts_of.items() if parts[0] == 0]
        epilogue = [name for name, parts in anatomy.parts_of.items() if parts[-1] == len(anatomy.blocks) + 1]
        trunk = anatomy.blocks[0].rpartition(".")[0] if anatomy.blocks else "none found"
        found |= {"trunk": f"{trunk} ({pluralize(len(anatomy.blocks), 'block')})" if anatomy.blocks else trunk,
                  "prologue": ", ".join(prologue) or "no parameters",
                  "epilogue": ", ".join(epilogue) or "no parameters",
                  "tied": ", ".join(f"{a} = {b}" for a, b in chain.sharding_plan.ties) or "none",
                  "frozen": ", ".join(frozen) or "none"}  # fmt: skip
    else:
        found["blocks"] = pluralize(len(chain.blocks()), "block")
    small = job.model_copy(update={"batch": BatchConfig(samples=max(4, 4 * (job.samples // 4)))})
    refusals = {axis: _refusal(small, Layout.parse(layout)) for axis, layout in LAYOUTS["inspect"].items()}
    found["axes"] = {axis: f"no: {why.partition(': ')[2] or why}" if why else "works" for axis, why in refusals.items()}
    return found


def prove(prepared: Prepared, say: Callable[[str], None]) -> None:
    """Proves the layout of a model that is not ours; raises JobError if it computes anything else, or if nothing can
    be compared. In float64, on a small copy with two ranks on every axis that it uses, the first steps must equal those
    of the unmodified module. Nothing is cached: a module may use code, files and settings that no key would cover."""
    if not _needs_proof(prepared, say):
        return
    job, layout = _small_copy(prepared)
    size = sum(weight.numel() for weight in meta_model(job.model, job.seed).parameters())
    _require_proof_memory(size, layout)
    if size > LARGE:
        say(f"proof:  comparing {format_count(size)} parameters in float64, which takes minutes; --no-proof skips it")

    (result,) = verify(job, [layout], PROOF_STEPS, timeout=_proof_timeout(job, size))
    if result.failure is not None:
        raise JobError(
            f"{result.describe().rstrip('.')}. The run was not started, since the same would end it; use another "
            "layout, or skip the proof (--no-proof, proof=False)."
        )
    if not result.ok:
        remedy = "check the plan and the module named, use another layout, or skip the proof (--no-proof, proof=False)"
        raise JobError(f"{result.describe()} The run was not started, since it would train another model; {remedy}.")
    say(f"proof:  layout '{layout}' equals one process: gradients to {result.grad:.0e}, weights to {result.weight:.0e}")


def _needs_proof(prepared: Prepared, say: Callable[[str], None]) -> bool:
    """Whether a model that is not ours is split in any way: over processes, or its batch into micro-batches."""
    if prepared.job.family.task(prepared.job.model) is None:
        return False
    if prepared.layout.world > 1:
        return True
    if prepared.batch.micro_batches == 1:
        return False

    # One process runs what PyTorch runs; its micro-batches draw other random numbers than the whole batch would.
    anatomy = getattr(prepared.model, "anatomy", None)
    if anatomy is not None and anatomy.random_module:
        what = f"{anatomy.random_module} draws random numbers in its forward"
        say(f"proof:  none: {what}, so micro-batches cannot be compared with a whole batch")
        return False
    return True


def _small_copy(prepared: Prepared) -> tuple[Job, Layout]:
    """Returns the job and the layout that are compared in place of the prepared ones."""
    layout = small_layout(prepared.layout)
    if prepared.batch.micro_batches == 1 and layout.pipeline == 1:
        layout = replace(layout, micro_batch=0)  # of a smaller batch, the same number would make several

    exact = {"precision": "float64", "compile": False, "gradient": GradientConfig()}  # without lossy compression
    job = shrink_model(prepared.job).model_copy(update=exact)
    size = sum(weight.numel() for weight in meta_model(job.model, job.seed).parameters())
    job = shrink_batch(job, [layout], smallest=4 if size > LARGE else 16)

    # The job's own batch need not fit the smaller layout: 9 samples on 3 ranks, which are 2 in the small copy.
    if _refusal(job, layout):
        for samples in range(2, 65):
            other = job.model_copy(update={"batch": BatchConfig(samples=samples)})
            if not _refusal(other, layout):
                return other, layout
    return job, layout


def _require_proof_memory(size: int, layout: Layout) -> None:
    """Raises JobError if the memory that is free here does not hold the comparison of this many parameters."""
    copies = layout.replicate * layout.shard * layout.context  # shards are counted as whole weights: an upper bound
    of_reference = REFERENCE_BYTES + RECORD_BYTES * (1 + RUNS) / 2  # it runs again if a difference may be rounding
    of_ranks = RECORD_BYTES + RANK_BYTES * copies
    needed = size * max(of_reference, of_ranks) + layout.world * FORKED_PROCESS_BYTES
    available = available_memory()
    if needed > available:
        raise JobError(
            f"the proof of layout '{layout}' compares {format_count(size)} parameters in float64, which takes about "
            f"{needed / GIB:,.1f} GiB of memory, but {available / GIB:,.1f} GiB are free here. Unproven, the run is "
            "not started: start it on a machine with more memory, or without the proof (--no-proof, proof=False)."
        )


def _proof_timeout(job: Job, size: int) -> float:
    """Returns after how many seconds a comparison hangs: many times what it takes on one slow core."""
    flops = 3 * PROOF_STEPS * job.samples * sum(forward_flops(job.model))
    return 240.0 + flops / 1e9 + PROOF_STEPS * size * 1e-6


def small_layout(layout: Layout) -> Layout:
    """Returns the layout with two ranks on every axis that it uses, and small micro-batches."""
    degrees = {axis: min(2, getattr(layout, axis)) for axis in (*AXES, "expert")}
    micro_batch = min(layout.micro_batch, 2)
    return replace(layout, **degrees, micro_batch=micro_batch)


def compare_with_transformers(job: Job, samples: int = 2) -> Answer:
    """Compares our model with transformers' module of the same weights, in float64 (`verify --against hf`): all logits,
    and the gradient that differs most, on random tokens and weights."""
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
        differences[name] = relative_error(gradient, theirs, GRADIENT_FLOOR)
    worst = max(differences, key=lambda name: differences[name])
    difference = relative_error(logits.detach(), expected.detach())
    found = {"module": type(reference).__name__, "logits": difference, "gradient": differences[worst],
             "parameter": worst, "count": len(differences)}  # fmt: skip
    found["ok"] = is_equal = max(difference, differences[worst]) <= TOLERANCE
    return Answer(found, fill_in(Path(__file__).with_name("against.txt"), found), is_equal)


def _in_module(job: Job, reference: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights or gradients of ours under the names and in the shapes of the reference, all of them."""
    found = ModuleWeights(job.family.export_weights(job.model, tensors), reference)
    names = [name for name, _ in reference.named_parameters()]
    if missing := [name for name in names if name not in found.found] or sorted(found.unused):
        raise JobError(f"{type(reference).__name__} and our model differ in the parameters {', '.join(missing)}.")
    return {name: found.value(name)[(slice(None),) * len(found.value(name).shape)] for name in names}
