"""From text to a token file: files -> documents -> tokenizer -> tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from shardwise.data.bad import Bad
from shardwise.data.text import Piece, find_files, read_pieces
from shardwise.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe
from shardwise.data.tokens import write_tokens
from shardwise.errors import DataError
from shardwise.job import Data, load_job
from shardwise.words import counted

TRAINING = 128 << 20
"""Bytes of text that pairs are trained on at most, spread evenly: more hardly changes them and takes hours."""
GROUP = 8 << 20
"""Characters that are encoded at once."""

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are done and those of all files."""


@dataclass(frozen=True)
class Summary:
    """What was written: tokens (with separators), documents, bytes of their text, ids of the tokenizer."""

    tokens: int
    documents: int
    bytes: int
    vocab: int
    tokenizer: Path | None = None
    """Where the tokenizer was saved, if one was trained: what `data.tokenizer` must be to use the tokens."""
    bad: str = ""
    """What was passed over, in words."""


def write_data(job_file: Path | None, settings: list[str], out: Path) -> str:
    """Writes a job's source as a token file; what was written, in words."""
    summary = encode(load_job(job_file, settings).data, out)
    size = f"{counted(summary.documents, 'document')}, {summary.bytes:,} bytes of text"
    words = f"{out}: {summary.tokens:,} tokens of a vocabulary of {summary.vocab:,} from {size}"
    if summary.tokenizer is not None:
        words += f"\n{summary.tokenizer}: the tokenizer that was trained on it, for data.tokenizer"
    return f"{words}\n{summary.bad}" if summary.bad else words


def encode(data: Data, out: Path, progress: Progress | None = None) -> Summary:
    """Writes the source's text as a token file; a `bpe:SIZE` tokenizer is trained and saved beside it."""
    if data.source not in ("stdlib", "text", "jsonl"):
        raise DataError(f"data.source = {data.source!r} has no text to encode; use stdlib, text or jsonl.")
    files = find_files(data.source, data.path)
    saved = out.with_suffix(".tokenizer.json") if bpe_size(data.tokenizer) else None
    if saved:
        saved.unlink(missing_ok=True)  # it may have been trained on other text
    bad = Bad(data.bad == "skip")
    summary = encode_files(data, files, tokenizer_for(data, files, saved, bad), out, bad, progress)
    return replace(summary, tokenizer=saved, bad=bad.words())


def encode_files(
    data: Data,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    bad: Bad,
    progress: Progress | None = None,
) -> Summary:
    total = sum(size_and_time(file)[0] for file in files)
    documents = size = 0

    def arrays() -> Iterator[np.ndarray]:
        nonlocal documents, size
        separator = np.array([tokenizer.separator], np.uint32)
        for group in _groups(_text(data, files, bad)):
            texts = [piece.text for piece in group]
            for piece, ids in zip(group, tokenizer.encode_all(texts), strict=True):
                yield ids
                if piece.ends:
                    yield separator
            documents += sum(piece.ends for piece in group)
            size += sum(len(text.encode()) for text in texts)
            if progress:
                progress(size, total)
        if not documents:
            raise DataError(
                f"{name_of(data)} holds no text: {counted(len(files), 'file')}, empty or binary. Give another path."
            )

    written = write_tokens(out, arrays(), tokenizer.vocab)
    return Summary(written.count, documents, size, tokenizer.vocab)


def _text(data: Data, files: Sequence[Path], bad: Bad) -> Iterator[Piece]:
    return read_pieces(data.source, data.path, data.field, files, bad)


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenizer_for(data: Data, files: Sequence[Path], saved: Path | None, bad: Bad) -> Tokenizer:
    """The tokenizer that the job names; pairs are trained once and kept at `saved`."""
    size = bpe_size(data.tokenizer)
    if size is None or saved is None:
        return load_tokenizer(data.tokenizer)
    if not saved.exists():
        every = -(-sum(size_and_time(file)[0] for file in files) // TRAINING)
        train_bpe((piece.text for piece in islice(_text(data, files, bad), 0, None, max(1, every))), size).save(saved)
    return load_tokenizer(str(saved))


def size_and_time(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return stat.st_size, stat.st_mtime_ns


def name_of(data: Data) -> str:
    return f"data.source = {data.source!r}" if data.source == "stdlib" else f"data.path = {data.path!r}"
