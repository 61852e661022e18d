"""From the `[data]` section of a job to its sources, and from text to a token file.

    files -> documents -> tokenizer -> token file -> windows -> training | validation
    text.py               tokenizer.py tokens.py     windows.py

Text is encoded once. The token file lies in a cache, in a folder named by a hash of all that determines it (format,
source, files with their sizes and times, tokenizer), so a changed corpus is a new folder and an unchanged one is opened
in no time. All ranks of a run ask for the same folder at once: one builds while the others wait at a lock, and where
the file system has no locks all build the same and the last one wins, since files appear whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np

from shardwise.data.source import Part, Source, Synthetic
from shardwise.data.text import Piece, find_files, read_pieces
from shardwise.data.tokenizer import Bytes, Tokenizer, bpe_size, fingerprint, load_tokenizer, train_bpe
from shardwise.data.tokens import RAW, TokenFile, open_raw, open_tokens, write_tokens
from shardwise.data.windows import Windows
from shardwise.errors import DataError
from shardwise.job import Data, Job
from shardwise.words import counted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Raised when the same files come to be encoded to other tokens, so that old caches are not taken for new ones."""
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


def cache_folder() -> Path:
    """Where encoded corpora are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwise"


def make_sources(job: Job, cache: Path | None = None) -> tuple[Source, Source, Tokenizer | None]:
    """The training samples, the validation samples (maybe none) and the tokenizer, where one is known."""
    if job.data.source == "synthetic":
        return *_synthetic(job), None
    files, tokenizer = _token_files(job) if job.data.source == "tokens" else _encoded(job, cache or cache_folder())
    source = Windows(files, job.model.sequence)
    if not len(source):
        longest = max(file.count for file in files)
        among = "the longest of its files has" if len(files) > 1 else "it has"
        raise DataError(
            f"{_name(job.data)} is too short for one sample: {among} {counted(longest, 'token')}, and a sample needs "
            f"model.sequence + 1 = {job.model.sequence + 1}. Give more text or a shorter model.sequence."
        )
    first_held = len(source) - _held(len(source), job.data.validation)
    return Part(source, 0, first_held), Part(source, first_held, len(source)), tokenizer


def encode(data: Data, out: Path, progress: Progress | None = None) -> Summary:
    """Writes the source's text as a token file; a `bpe:SIZE` tokenizer is trained and saved beside it."""
    if data.source in ("tokens", "synthetic"):
        raise DataError(f"data.source = {data.source!r} has no text to encode; use stdlib, text or jsonl.")
    files = find_files(data.source, data.path)
    saved = out.with_suffix(".tokenizer.json") if bpe_size(data.tokenizer) else None
    if saved:
        saved.unlink(missing_ok=True)  # it may have been trained on other text
    return _encode(data, files, _tokenizer(data, files, saved), out, progress, saved)


def _synthetic(job: Job) -> tuple[Source, Source]:
    # Validation goes on where training ends: other walks under the same rule. Under a second seed's rule nothing that
    # was learned would hold.
    count = job.data.samples
    longer = Synthetic(count + _held(count + 1, job.data.validation), job.model.sequence, job.model.vocab, job.seed)
    return Part(longer, 0, count), Part(longer, count, len(longer))


def _held(count: int, share: float) -> int:
    """Samples held out of `count`: at least one if any are wanted, and never all."""
    return min(count - 1, max(1, round(count * share))) if share > 0 else 0


# Tokens that are there already


def _token_files(job: Job) -> tuple[list[TokenFile], Tokenizer | None]:
    path, kind = job.data.path, ""
    for known in RAW:
        if path.endswith(f":{known}"):
            path, kind = path.removesuffix(f":{known}"), known
    found = find_files("tokens", path)
    files = [open_raw(file, kind, job.model.vocab) if kind else open_tokens(file) for file in found]
    for file in files:
        _check_vocab(f"the token file {file.path}", file.vocab, job)
    return files, _tokenizer_of(0 if kind else max(file.vocab for file in files), job)


def _tokenizer_of(vocab: int, job: Job) -> Tokenizer | None:
    """What may have written tokens of a vocabulary (0: unknown): a tokenizer by its path, `bytes` only if it fits."""
    if bpe_size(job.data.tokenizer):
        raise DataError(
            f"data.tokenizer = {job.data.tokenizer!r} would be trained on text, and data.source = 'tokens' has none; "
            f"give the path of the tokenizer.json that the tokens were made with."
        )
    if job.data.tokenizer == "bytes":
        return Bytes() if vocab == Bytes.vocab else None
    tokenizer = load_tokenizer(job.data.tokenizer)
    if tokenizer.vocab < vocab:
        raise DataError(
            f"data.tokenizer = {job.data.tokenizer!r} has {tokenizer.vocab} ids, but the tokens of {job.data.path} "
            f"were made with {vocab}; give the tokenizer that they were made with."
        )
    return tokenizer


# Text


def _encoded(job: Job, cache: Path) -> tuple[list[TokenFile], Tokenizer]:
    """The source's token file from the cache, made there if it is not."""
    _check_vocab("the tokenizer", bpe_size(job.data.tokenizer) or 0, job)  # before an hour of training pairs, not after
    files = find_files(job.data.source, job.data.path)
    folder = cache / _key(job.data, files)
    with _alone(folder):
        tokenizer = _tokenizer(job.data, files, folder / "tokenizer.json")
        _check_vocab("the tokenizer", tokenizer.vocab, job)
        try:
            tokens = open_tokens(folder / "tokens.bin")
        except DataError:  # not there, or torn by something else than us
            _encode(job.data, files, tokenizer, folder / "tokens.bin")
            tokens = open_tokens(folder / "tokens.bin")
    return [tokens], tokenizer


def _encode(
    data: Data,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    progress: Progress | None = None,
    saved: Path | None = None,
) -> Summary:
    total = sum(_stat(file)[0] for file in files)
    documents = size = 0

    def arrays() -> Iterator[np.ndarray]:
        nonlocal documents, size
        separator = np.array([tokenizer.separator], np.uint32)
        for group in _groups(_text(data, files)):
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
                f"{_name(data)} holds no text: {counted(len(files), 'file')}, empty or binary. Give another path."
            )

    written = write_tokens(out, arrays(), tokenizer.vocab)
    return Summary(written.count, documents, size, tokenizer.vocab, saved)


def _text(data: Data, files: Sequence[Path]) -> Iterator[Piece]:
    return read_pieces(data.source, data.path, data.field, files)


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


def _tokenizer(data: Data, files: Sequence[Path], saved: Path | None) -> Tokenizer:
    """The tokenizer that the job names; pairs are trained once and kept at `saved`."""
    size = bpe_size(data.tokenizer)
    if size is None or saved is None:
        return load_tokenizer(data.tokenizer)
    if not saved.exists():
        every = -(-sum(_stat(file)[0] for file in files) // TRAINING)
        train_bpe((piece.text for piece in islice(_text(data, files), 0, None, max(1, every))), size).save(saved)
    return load_tokenizer(str(saved))


# The cache


def _key(data: Data, files: Sequence[Path]) -> str:
    what = (FORMAT, data.source, data.field if data.source == "jsonl" else "", fingerprint(data.tokenizer))
    listing = [(str(file.absolute()), *_stat(file)) for file in files]
    return f"{data.source}-{blake2b(repr((what, listing)).encode(), digest_size=8).hexdigest()}"


def _stat(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return stat.st_size, stat.st_mtime_ns


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process is in the block for this folder, where the file system can tell. Death frees the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError:  # a cache that was filled elsewhere and is mounted read-only needs no lock
        yield
        return
    with lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _check_vocab(who: str, ids: int, job: Job) -> None:
    if ids > job.model.vocab:
        raise DataError(f"{who} has {ids} ids but model.vocab is {job.model.vocab}; set model.vocab = {ids}.")


def _name(data: Data) -> str:
    return f"data.source = {data.source!r}" if data.source == "stdlib" else f"data.path = {data.path!r}"
