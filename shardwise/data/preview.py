"""`shardwise data preview`: samples as the model gets them, with what counts towards the loss."""

from collections.abc import Iterator

import numpy as np

from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import job_stream
from shardwise.errors import DataError
from shardwise.job import Job
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import plain_targets


def preview_job(job: Job, count: int, in_colour: bool) -> Iterator[str]:
    """Yields lines about the first samples of a run. What counts is green, the rest dim; or it is in brackets."""
    source, _, tokenizer = make_sources(job)
    if tokenizer is None:
        raise DataError(f"data.source = {job.data.source!r} has no tokenizer, so its samples cannot be shown as text.")
    yield getattr(source, "summary", f"{len(source)} samples for training.")
    counted, other = ("\033[32m{}\033[0m", "\033[2m{}\033[0m") if in_colour else ("[[{}]]", "{}")
    samples = job_stream(job, source).read(np.arange(count))
    for number, (tokens, targets) in enumerate(zip(samples.tokens.numpy(), samples.targets.numpy(), strict=True)):
        counts, targets = targets != IGNORE_INDEX, plain_targets(targets)
        yield f"--- sample {number}: {int(counts.sum())} of {len(tokens)} tokens count"
        borders = sorted({0, *np.flatnonzero(tokens < 0).tolist(), len(tokens)})  # of packed conversations
        for start, stop in zip(borders, borders[1:]):
            ids = np.append(np.maximum(tokens, ~tokens)[start:stop], targets[stop - 1 : stop][counts[stop - 1 : stop]])
            marks = np.append(False, counts[start:stop])[: len(ids)]
            ids = ids[: len(np.trim_zeros(ids != tokenizer.eos_id, "b"))]  # without padding
            cuts = [0, *(np.flatnonzero(np.diff(marks[: len(ids)])) + 1).tolist(), len(ids)]
            parts = [(marks[a], tokenizer.decode(ids[a:b], keep_special=True)) for a, b in zip(cuts, cuts[1:])]
            if len(ids):
                yield "".join((counted if is_counted else other).format(text) for is_counted, text in parts)
