"""`shardwise verify`: selects the layouts to verify and shrinks the model and the batch."""

from collections.abc import Callable
from pathlib import Path

from shardwise.errors import UserError
from shardwise.job import BatchConfig, Job, load_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
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
        selected = [layout for layout in selected if _is_supported(job, layout)]
    return verify(job, selected, steps, show)


def _is_supported(job: Job, layout: Layout) -> bool:
    try:
        prepare(job, layout)
    except UserError:
        return False
    return True


def shrink_model(job: Job) -> Job:
    return job.model_copy(update={"model": job.family.shrink(job.model)})


def shrink_batch(job: Job, layouts: list[Layout]) -> Job:
    """Returns the job with the smallest batch (16, 24, ..., 1024 samples) that every layout can run, or unchanged."""
    for samples in range(16, min(job.samples, 1025), 8):
        small = job.model_copy(update={"batch": BatchConfig(samples=samples)})
        if all(_is_supported(small, layout) for layout in layouts):
            return small
    return job
