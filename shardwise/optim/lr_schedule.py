"""Learning rate schedules: warmup, then constant, cosine, linear or warmup-stable-decay (wsd)."""

import math

import torch

from shardwise.job import Job, OptimizerConfig


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of a step, counted from 0. Decay reaches `min_lr_ratio` times `lr` in the last step."""
    warmup = round(settings.warmup * total_steps if settings.warmup < 1 else settings.warmup)
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    if settings.schedule == "constant":
        return settings.lr
    decay = settings.wsd_decay * total_steps if settings.wsd_decay < 1 else settings.wsd_decay
    decay_start = warmup if settings.schedule != "wsd" else max(warmup, round(total_steps - 1 - decay))
    progress = min(1.0, max(0.0, (step - decay_start) / max(1, total_steps - 1 - decay_start)))
    if settings.schedule == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.lr * (1.0 - (1.0 - settings.min_lr_ratio) * progress)


def job_learning_rate(job: Job, step: int, total_steps: int) -> float:
    """Returns the learning rate of a step: by the user's own function, or else by the job's schedule."""
    task = job.family.task(job.model)
    if task is not None and task.learning_rate is not None:
        return float(task.learning_rate(step))
    return learning_rate(job.optimizer, step, total_steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
