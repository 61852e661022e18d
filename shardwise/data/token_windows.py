"""Samples as fixed-length windows of token files.

With sequence length S, sample i is the tokens [i S, i S + S + 1). Its last token is the next sample's first, so every
token of a file's windows except the first is a target exactly once. An incomplete last window is dropped.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from shardwise.data.token_file import TokenFile
from shardwise.errors import DataError


class TokenWindows:
    """The windows of several token files, concatenated; a window never spans two files."""

    def __init__(self, files: Sequence[TokenFile], length: int):
        self.files, self.length = tuple(files), length
        self.vocab = max(file.vocab for file in self.files)
        self._cumulative_sizes = list(accumulate(max(0, file.count - 1) // length for file in self.files))

    def __len__(self) -> int:
        return self._cumulative_sizes[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is out of range for {len(self)} samples")
        file_index = bisect_right(self._cumulative_sizes, index)
        file = self.files[file_index]
        first = (index - (self._cumulative_sizes[file_index - 1] if file_index else 0)) * self.length
        tokens = file.read(first, first + self.length + 1)
        # Ids can exceed the declared vocabulary (headerless files, bit flips). On a GPU, an id beyond the embedding's
        # rows fails with a device assertion that names neither file nor sample.
        if (largest := int(tokens.max())) >= file.vocab:
            token_index = first + int(tokens.argmax())
            raise DataError(
                f"{file.path} has id {largest} at token {token_index} (sample {index}), but its ids must be below "
                f"{file.vocab}. Set model.vocab = {largest + 1} or more, or write the file again."
            )
        return tokens
