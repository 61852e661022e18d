"""From the `[data]` section of a job to its sources.

    files -> documents -> tokenizer -> token file -> windows -> training | validation
    text.py               tokenizer.py tokens.py     windows.py

`encode.py` takes text as far as its token file, here or for the command `shardwise data`.

Text is encoded once. The token file lies in a cache, in a folder named by a hash of all that determines it (format,
source, files with their sizes and times, tokenizer), so a changed corpus is a new folder and an unchanged one is opened
in no time. All ranks of a run ask for the same folder at once: one builds while the others wait at a lock, and where
the file system has no locks all build the same and the last one wins, since files appear whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from shardwise.data.encode import encode_files, name_of, size_and_time, tokenizer_for
from shardwise.data.images import Drawn
from shardwise.data.source import Part, Source, Synthetic
from shardwise.data.text import find_files
from shardwise.data.tokenizer import Bytes, Tokenizer, bpe_size, fingerprint, load_tokenizer
from shardwise.data.tokens import RAW, TokenFile, open_raw, open_tokens
from shardwise.data.windows import Windows
from shardwise.errors import DataError
from shardwise.job import Data, Job
from shardwise.kinds import ResNet
from shardwise.words import counted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
"""Raised when the same files come to be encoded to other tokens, so that old caches are not taken for new ones."""


def cache_folder() -> Path:
    """Where encoded corpora are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwise"


def make_sources(job: Job, cache: Path | None = None) -> tuple[Source, Source, Tokenizer | None]:
    """The training samples, the validation samples (maybe none) and the tokenizer, where one is known."""
    if job.data.source == "synthetic":
        return *_synthetic(job), None
    if isinstance(job.model, ResNet):
        raise DataError(
            f"data.source = {job.data.source!r} is text, and {job.model.what} reads images; use "
            'data.source = "synthetic", which draws some.'
        )
    files, tokenizer = _token_files(job) if job.data.source == "tokens" else _encoded(job, cache or cache_folder())
    source = Windows(files, job.model.window)
    if not len(source):
        longest = max(file.count for file in files)
        among = "the longest of its files has" if len(files) > 1 else "it has"
        raise DataError(
            f"{name_of(job.data)} is too short for one sample: {among} {counted(longest, 'token')}, and a sample needs "
            f"{job.model.window + 1}. Give more text or a shorter model.sequence."
        )
    first_held = len(source) - _held(len(source), job.data.validation)
    return Part(source, 0, first_held), Part(source, first_held, len(source)), tokenizer


def _synthetic(job: Job) -> tuple[Source, Source]:
    # Validation goes on where training ends: other walks under the same rule. Under a second seed's rule nothing that
    # was learned would hold.
    count = job.data.samples
    longer = made_up(job, count + _held(count + 1, job.data.validation))
    return Part(longer, 0, count), Part(longer, count, len(longer))


def made_up(job: Job, count: int) -> Source:
    """Samples that need no files, for any kind of model."""
    model = job.built()
    if isinstance(model, ResNet):
        return Drawn(count, model.image, model.classes, job.seed)
    return Synthetic(count, model.window, model.vocab - model.spare, job.seed)


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
    model = job.built()
    assert not isinstance(model, ResNet)
    files = [open_raw(file, kind, model.vocab - model.spare) if kind else open_tokens(file) for file in found]
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
        tokenizer = tokenizer_for(job.data, files, folder / "tokenizer.json")
        _check_vocab("the tokenizer", tokenizer.vocab, job)
        try:
            tokens = open_tokens(folder / "tokens.bin")
        except DataError:  # not there, or torn by something else than us
            encode_files(job.data, files, tokenizer, folder / "tokens.bin")
            tokens = open_tokens(folder / "tokens.bin")
    return [tokens], tokenizer


# The cache


def _key(data: Data, files: Sequence[Path]) -> str:
    what = (FORMAT, data.source, data.field if data.source == "jsonl" else "", fingerprint(data.tokenizer))
    listing = [(str(file.absolute()), *size_and_time(file)) for file in files]
    return f"{data.source}-{blake2b(repr((what, listing)).encode(), digest_size=8).hexdigest()}"


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
    model = job.built()
    assert not isinstance(model, ResNet)
    if ids + model.spare > model.vocab:
        own = f", and {model.what} needs {model.spare} of its own" if model.spare else ""
        needed = ids + model.spare
        raise DataError(f"{who} has {ids} ids but model.vocab is {model.vocab}{own}; set model.vocab = {needed}.")
