"""Trains `net.py` in any layout:

python train.py                       a layout chosen for this machine
python train.py "pipeline=2 shard=2"  four processes
torchrun --nproc-per-node 2 train.py "shard=2 zero=3"
"""

import sys

from net import Classifier, MostFrequent
from torch import nn

import shardwise

trainer = shardwise.Trainer(
    model=Classifier, loss=nn.CrossEntropyLoss(), data=MostFrequent(), steps=60, batch=32, lr=1e-3,
    layout=sys.argv[1] if len(sys.argv) > 1 else "auto",
)  # fmt: skip

if __name__ == "__main__":
    run = trainer.fit()
    print(f"loss {run.metrics[0]['loss']:.3f} -> {run.loss:.3f}")
