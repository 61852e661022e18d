"""Optimizers for parameter shards, and learning rate schedules."""

from shardwise.optim.lr_schedule import learning_rate, set_learning_rate
from shardwise.optim.optimizer_factory import make_optimizer

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]
