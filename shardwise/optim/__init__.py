"""Optimizers for parameter shards, and learning rate schedules."""

from shardwise.optim.lr_schedule import job_learning_rate, learning_rate, set_learning_rate
from shardwise.optim.optimizer_factory import make_optimizer, make_user_optimizer

__all__ = ["job_learning_rate", "learning_rate", "make_optimizer", "make_user_optimizer", "set_learning_rate"]
