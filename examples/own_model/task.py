"""The same task for a job file: `model.name = "python:task:build"`."""

from net import Classifier, MostFrequent
from torch import nn

import shardwise


def build(width: int = 64, layers: int = 4) -> shardwise.Task:
    return shardwise.Task(
        lambda: Classifier(width=width, layers=layers), loss=nn.CrossEntropyLoss(), data=MostFrequent(),
        plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    )  # fmt: skip
