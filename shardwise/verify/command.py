"""`shardwise verify`: the layouts to verify, a smaller model and batch. `shardwise inspect`: a model's anatomy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.console import format_count, pluralize
from shardwise.errors import UserError
from shardwise.job import BatchConfig, Job, load_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import meta_model, prepare
from shardwise.verify.parity import VerifyResult, verify

# One layout per axis, and combinations of axes, with up to 8 processes.
DEFAULT_LAYOUTS = (
    "replicate=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "tensor=2", "pipeline=2",
    "pipeline=2 schedule=gpipe", "pipeline=2 schedule=interleaved", "pipeline=2 schedule=zero-bubble",
    "pipeline=2 schedule=zbv", "pipeline=2 schedule=dualpipev", "shard=2 tensor=2 zero=3",
    "pipeline=2 tensor=2", "pipeline=2 shard=2 zero=2", "replicate=2 shard=2", "pipeline=2 shard=2 tensor=2",
    "context=2", "context=2 context_method=ulysses", "shard=2 context=2 zero=3", "pipeline=2 context=2 tensor=2",
    "shard=2 expert=2", "shard=2 context=2 expert=4 zero=2", "pipeline=2 context=2 tensor=2 expert=2",
)  # fmt: skip


def verify_job(
    job_file: Path | None, settings: list[str], layouts: list[str], shrink: bool, steps: int,
    show: Callable[[VerifyResult], None],
) -> list[VerifyResult]:  # fmt: skip
    """Verifies the given layouts, or else the job's layout, or else every default layout that the job supports."""
    job = load_job(job_file, ["precision=float64", *settings])
    requested = layouts or ([job.layout] if job.layout != "auto" else [])
    default_layouts = job.family.verify_layouts or DEFAULT_LAYOUTS
    selected = [Layout.parse(text) for text in requested or default_layouts]
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


def shrink_batch(job: Job, layouts: list[Layout]) -> Job:
    """Returns the job with the smallest batch (16, 24, ..., 1024 samples) that every layout can run, or unchanged."""
    for samples in range(16, min(job.samples, 1025), 8):
        small = job.model_copy(update={"batch": BatchConfig(samples=samples)})
        if not any(_refusal(small, layout) for layout in layouts):
            return small
    return job


LAYOUTS = {
    "replicate": "replicate=2", "shard": "shard=2 zero=3", "pipeline": "pipeline=2", "context": "context=2",
    "tensor": "tensor=2", "expert": "shard=2 expert=2", "recompute": "recompute=full",
}  # fmt: skip


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
        found |= {
            "trunk": f"{trunk} ({pluralize(len(anatomy.blocks), 'block')})" if anatomy.blocks else trunk,
            "prologue": ", ".join(prologue) or "no parameters", "epilogue": ", ".join(epilogue) or "no parameters",
            "tied": ", ".join(f"{a} = {b}" for a, b in chain.sharding_plan.ties) or "none",
            "frozen": ", ".join(frozen) or "none",
        }  # fmt: skip
    else:
        found["blocks"] = pluralize(len(chain.blocks()), "block")
    small = job.model_copy(update={"batch": BatchConfig(samples=max(4, 4 * (job.samples // 4)))})
    refusals = {axis: _refusal(small, Layout.parse(layout)) for axis, layout in LAYOUTS.items()}
    found["axes"] = {axis: f"no: {why.partition(': ')[2] or why}" if why else "works" for axis, why in refusals.items()}
    return found
