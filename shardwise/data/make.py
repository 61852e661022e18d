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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from shardwise.data.augment import Augment
from shardwise.data.bad import Bad
from shardwise.data.cifar import CLASSES, SIDE, open_cifar
from shardwise.data.criteo import CATEGORIES, COUNTS, Criteo, Generated, open_criteo
from shardwise.data.encode import encode_files, name_of, size_and_time, tokenizer_for
from shardwise.data.images import Drawn
from shardwise.data.source import Mixture, Part, Source, Synthetic
from shardwise.data.text import find_files
from shardwise.data.tokenizer import Bytes, Tokenizer, bpe_size, fingerprint, load_tokenizer
from shardwise.data.tokens import RAW, TokenFile, open_raw, open_tokens
from shardwise.data.windows import Windows
from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.job import Data, Job
from shardwise.kinds import DLRM, ResNet
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


def make_sources(
    job: Job, cache: Path | None = None, bad: Bad | None = None
) -> tuple[Source, Source, Tokenizer | None]:
    """The training samples, the validation samples (maybe none) and the tokenizer, where one is known."""
    bad = bad or Bad(job.data.bad == "skip")
    if isinstance(job.model, DLRM):
        return *clicks_of(job, bad), None
    if job.data.source == "criteo":
        raise DataError(f"data.source = 'criteo' has clicks, but model.name = {job.model.name!r} reads tokens.")
    if job.data.source == "synthetic":
        return *_synthetic(job), None
    if isinstance(job.model, ResNet):
        return *_images(job, job.model, bad), None
    if job.data.source == "cifar10":
        raise DataError(f"data.source = 'cifar10' has images, but model.name = {job.model.name!r} reads tokens.")
    if job.data.source == "mix":
        return _mixed(job, job.data.mix, cache, bad)
    return _windows(job, cache or cache_folder(), bad)


def _mixed(job: Job, mix: Mapping[str, float], cache: Path | None, bad: Bad) -> tuple[Source, Source, Tokenizer | None]:
    """Of a mixture, each part as if it were the only one: its last samples are held out too."""
    if bpe_size(job.data.tokenizer):
        raise DataError(
            f"data.tokenizer = {job.data.tokenizer!r} would be another one for each source of the mixture; train one "
            "with `shardwise data` and give its path."
        )
    made = []
    for name in mix:
        data = job.data.model_copy(update=dict(zip(("source", "path"), _kind_and_path(name))) | {"mix": {}})
        made.append(_windows(job.model_copy(update={"data": data}), cache or cache_folder(), bad))
    trained, held, tokenizers = zip(*made)
    tokenizer = tokenizers[0] if all(tokenizer is not None for tokenizer in tokenizers) else None
    weights = list(mix.values())
    return _mixture(trained, weights), _mixture(held, weights), tokenizer


def _kind_and_path(name: str) -> tuple[str, str]:
    """What a name in a mixture means."""
    kind, colon, path = name.partition(":")
    if name == "stdlib" or (colon and kind in ("text", "jsonl", "tokens")):
        return kind, path
    if name.endswith((".bin", *(f".bin:{kind}" for kind in RAW))):
        return "tokens", name
    return "jsonl" if name.endswith((".jsonl", ".ndjson")) else "text", name


def _mixture(parts: Sequence[Source], weights: Sequence[float]) -> Source:
    there = [(part, weight) for part, weight in zip(parts, weights, strict=True) if len(part)]
    return Mixture(*zip(*there, strict=True)) if there else parts[0]


def _images(job: Job, model: ResNet, bad: Bad) -> tuple[Source, Source]:
    if job.data.source != "cifar10":
        raise DataError(
            f"data.source = {job.data.source!r} is text, and {model.what} reads images; use "
            'data.source = "cifar10", or "synthetic", which draws some.'
        )
    if model.image != SIDE or model.classes < CLASSES:
        raise DataError(
            f"CIFAR-10 has images of {SIDE} x {SIDE} in {CLASSES} classes, but model.image is {model.image} and "
            f"model.classes is {model.classes}; set them to {SIDE} and {CLASSES}."
        )
    return open_cifar(job.data.path, bad, augment_of(job))


def augment_of(job: Job) -> Augment | None:
    return Augment(job.data.augment, job.seed) if job.data.augment else None


def _windows(job: Job, cache: Path, bad: Bad) -> tuple[Source, Source, Tokenizer | None]:
    files, tokenizer = _token_files(job) if job.data.source == "tokens" else _encoded(job, cache, bad)
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
    count, model = job.data.samples, job.model
    held = _held(count + 1, job.data.validation)
    if isinstance(model, ResNet):
        return made_up(job, count), Drawn(held, model.image, model.classes, job.seed, first=count)
    longer = made_up(job, count + held)
    return Part(longer, 0, count), Part(longer, count, len(longer))


def made_up(job: Job, count: int) -> Source:
    """Samples that need no files, for any kind of model."""
    model = job.built()
    if isinstance(model, ResNet):
        return Drawn(count, model.image, model.classes, job.seed, augment_of(job))
    return Synthetic(count, model.window, model.vocab - model.spare, job.seed)


def clicks_of(job: Job, bad: Bad) -> tuple[Source, Source]:
    """Of a DLRM: rows of a generated log, or of Criteo's, of which the last ones are held out."""
    model, count = job.model, job.data.samples
    assert isinstance(model, DLRM)
    if job.data.source == "synthetic":
        held = _held(count + 1, job.data.validation)
        return Generated(model, 0, count, job.seed), Generated(model, count, held, job.seed)
    if job.data.source != "criteo":
        raise DataError(
            f"data.source = {job.data.source!r} has no clicks, which a DLRM reads; use 'synthetic', or 'criteo' with "
            "the file as data.path."
        )
    if (model.tables, model.features) != (CATEGORIES, COUNTS):
        raise DataError(
            f"Criteo's rows have {CATEGORIES} categories and {COUNTS} counts, but model.tables is {model.tables} and "
            f"model.features is {model.features}; set them to {CATEGORIES} and {COUNTS}."
        )
    if not job.data.path:
        raise DataError("data.source = 'criteo' reads a file of Criteo's rows; give it as data.path.")
    path = Path(job.data.path)
    offsets, lines = open_criteo(path)
    first = lines - _held(lines, job.data.validation)
    return Criteo(model, path, offsets, 0, first, bad), Criteo(model, path, offsets, first, lines - first, bad)


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


def _encoded(job: Job, cache: Path, bad: Bad) -> tuple[list[TokenFile], Tokenizer]:
    """The source's token file from the cache, made there if it is not."""
    _check_vocab("the tokenizer", bpe_size(job.data.tokenizer) or 0, job)  # before an hour of training pairs, not after
    files = find_files(job.data.source, job.data.path)
    folder = cache / _key(job.data, files)
    with _alone(folder):
        new = Bad(bad.skip)
        tokenizer = tokenizer_for(job.data, files, folder / "tokenizer.json", new)
        _check_vocab("the tokenizer", tokenizer.vocab, job)
        try:
            tokens = open_tokens(folder / "tokens.bin")
        except DataError:  # not there, or torn by something else than us
            encode_files(job.data, files, tokenizer, folder / "tokens.bin", new)
            if bad.skip:
                write_text(folder / "bad.txt", "".join(f"{sentence}\n" for sentence in new.seen))
            tokens = open_tokens(folder / "tokens.bin")
    if bad.skip:
        for sentence in (folder / "bad.txt").read_text(encoding="utf-8").splitlines():
            bad.tell(DataError(sentence))
    return [tokens], tokenizer


# The cache


def _key(data: Data, files: Sequence[Path]) -> str:
    field = f"{data.field}{':skip' if data.bad == 'skip' else ''}" if data.source == "jsonl" else ""
    what = (FORMAT, data.source, field, fingerprint(data.tokenizer))
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
