"""`shardwise verify`: which job, which layouts; how a model is made small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.errors import UserError
from shardwise.job import BatchSize, Job, load_job
from shardwise.kinds import DLRM
from shardwise.layout import Layout
from shardwise.parallel.parallelize import check
from shardwise.verify import clicks
from shardwise.verify.parity import Record, verify

# One layout for each axis, and products of them, up to 8 processes.
DEFAULT = (
    "replicate=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "tensor=2", "pipeline=2",
    "pipeline=2 schedule=gpipe", "pipeline=2 schedule=interleaved", "pipeline=2 schedule=zero-bubble",
    "pipeline=2 schedule=zbv", "pipeline=2 schedule=dualpipev", "shard=2 tensor=2 zero=3",
    "pipeline=2 tensor=2", "pipeline=2 shard=2 zero=2", "replicate=2 shard=2", "pipeline=2 shard=2 tensor=2",
    "context=2", "context=2 context_by=heads", "shard=2 context=2 zero=3", "pipeline=2 context=2 tensor=2",
    "shard=2 expert=2", "shard=2 context=2 expert=4 zero=2", "pipeline=2 context=2 tensor=2 expert=2",
)  # fmt: skip


def verify_job(
    job_file: Path | None,
    settings: list[str],
    layouts: list[str],
    shrink: bool,
    steps: int,
    show: Callable[[Record], None],
) -> list[Record]:
    """Proves the given layouts, or those of the default set that this job can have."""
    job = load_job(job_file, ["precision=float64", *settings])
    asked = layouts or ([job.layout] if job.layout != "auto" else [])
    usual = clicks.LAYOUTS if isinstance(job.model, DLRM) else DEFAULT
    chosen = [Layout.parse(text) for text in asked or usual]
    if shrink:
        job = with_small_batch(shrunk(job), chosen)
    if not asked:
        chosen = [layout for layout in chosen if _possible(job, layout)]
    return verify(job, chosen, steps, show)


def _possible(job: Job, layout: Layout) -> bool:
    try:
        check(job, layout)
    except UserError:
        return False
    return True


def shrunk(job: Job) -> Job:
    return job.model_copy(update={"model": (job.model if isinstance(job.model, DLRM) else job.built()).small()})


def with_small_batch(job: Job, layouts: list[Layout]) -> Job:
    """The smallest global batch from 16 samples on that every layout can serve, where the job's own is larger."""
    for samples in range(16, job.samples, 8):
        small = job.model_copy(update={"batch": BatchSize(samples=samples)})
        if all(_possible(small, layout) for layout in layouts):
            return small
    return job
