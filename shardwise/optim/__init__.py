"""Optimizers over pieces of weights, and the schedules of their learning rate."""

from shardwise.optim.make import make_optimizer
from shardwise.optim.schedule import learning_rate, set_learning_rate

__all__ = ["learning_rate", "make_optimizer", "set_learning_rate"]
