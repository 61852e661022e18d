"""A source for the loader's tests, apart from them because workers import this file and need not import pytest."""

from __future__ import annotations

import os
import signal
import time

import numpy as np


class Marks:
    """Sample i is i repeated; some samples are slow, raise or kill whoever reads them."""

    def __init__(self, count: int, fatal: int = -1, wrong: int = -1, slow: int = -1):
        self.count, self.fatal, self.wrong, self.slow = count, fatal, wrong, slow
        self.length, self.vocab = 3, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        if index == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.wrong:
            raise ValueError("a torn picture")
        if index == self.slow:
            time.sleep(0.3)
        return np.full(4, index, np.int64)
