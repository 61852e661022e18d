"""Settings of a job that are possible but hardly meant. Each is one warning at the start; `--strict` refuses them."""

from fnmatch import fnmatchcase

from shardwise.console import pluralize
from shardwise.data.source import Source
from shardwise.parallel.prepare import Prepared

MAX_EPOCHS, MAX_LEARNING_RATE = 100, 10.0


def find_warnings(prepared: Prepared, training: Source, held_out: Source) -> list[str]:
    """Returns one sentence per suspicious setting."""
    job, optimizer, steps = prepared.job, prepared.job.optimizer, prepared.job.total_steps
    task, epochs = job.family.task(job.model), steps * job.samples / max(1, len(training))
    found = {
        f"data.path = {job.data.path!r} is not read, because data.source is {job.data.source!r}.":
            job.data.path and job.data.source in ("stdlib", "synthetic", "mix"),
        f"a batch has {job.samples} samples, but the data has only {len(training)}, so a batch repeats some.":
            job.samples > len(training),
        f"{pluralize(steps, 'step')} read each of the {len(training)} samples about {epochs:.0f} times.":
            epochs > MAX_EPOCHS,
        f"validation.every = {job.validation.every} has no effect, because no samples are held out.":
            job.validation.every and not len(held_out),
    }  # fmt: skip
    if task is None or task.learning_rate is None:
        found |= {
            "optimizer.lr = 0 trains nothing.": not optimizer.lr,
            f"optimizer.lr = {optimizer.lr:g} is far larger than any usual one.": optimizer.lr > MAX_LEARNING_RATE,
            f"optimizer.warmup = {optimizer.warmup:g} is not shorter than the run, so the learning rate never reaches "
            "optimizer.lr.": optimizer.warmup >= max(2, steps),
        }  # fmt: skip
    for pattern in optimizer.weight_decay_overrides:
        matches = any(fnmatchcase(name, pattern) for name in prepared.shapes)
        found[f"optimizer.weight_decay_overrides: {pattern!r} is the name of no parameter."] = not matches
    return [sentence for sentence, is_true in found.items() if is_true]
