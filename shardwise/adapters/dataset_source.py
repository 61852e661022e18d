"""A user's dataset as a source: samples are read by index and collated into batches of tensors."""

from typing import Any

import numpy as np
import torch

from shardwise.adapters.task import NumberedStream, Task, flatten_batch, indexed
from shardwise.data.sample_stream import Samples
from shardwise.errors import DataError


class DatasetSource:
    length, vocab = 1, 0

    def __init__(self, task: Task, dataset: Any):
        self.task, self.dataset = task, indexed(dataset)

    @property
    def stream(self) -> NumberedStream | None:
        """The dataset, if it is read in its own order."""
        return self.dataset if isinstance(self.dataset, NumberedStream) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        if self.stream is not None:
            self.stream.seek(int(indices[0]))
        rows = []
        for index in indices.tolist():
            try:
                rows.append(self.dataset[index])
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise DataError(f"sample {index} of {type(self.dataset).__name__} cannot be read: {cause}.") from error
        batch = self.task.collate_rows(rows)
        leaves, _ = flatten_batch(batch, len(rows))
        total = len(rows) if self.task.count is None else float(self.task.count(batch))
        counts = torch.full((len(rows),), total / len(rows), dtype=torch.float64)
        targets = torch.zeros(len(rows), 1, dtype=torch.int64)
        return Samples(leaves[0], targets, torch.from_numpy(positions.astype(np.int64)), None, tuple(leaves), counts)
