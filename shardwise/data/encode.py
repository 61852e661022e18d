"""Encodes text into a token file: files -> documents -> tokenizer -> tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from shardwise.console import pluralize
from shardwise.data.bad_records import BadRecords
from shardwise.data.fingerprint import DataFile, DataRecord
from shardwise.data.text import TextChunk, find_files, read_chunks
from shardwise.data.token_file import write_token_arrays
from shardwise.data.tokenizer import Tokenizer, load_tokenizer, parse_bpe_size, train_bpe
from shardwise.errors import DataError
from shardwise.files import require_parent_folder
from shardwise.job import DataConfig, load_job

MAX_BPE_TRAINING_BYTES = 128 << 20
"""A BPE tokenizer is trained on about this many bytes, sampled evenly; more takes hours and hardly changes it."""
ENCODE_BATCH_CHARS = 8 << 20  # characters per call of the tokenizer


@dataclass(frozen=True)
class EncodingSummary:
    """Counts of a written token file. `tokens` includes end-of-document tokens; `text_bytes` is in UTF-8."""

    tokens: int
    documents: int
    text_bytes: int
    vocab: int
    tokenizer: Path | None = None  # path of a trained tokenizer: the value of `data.tokenizer` for jobs on these tokens
    bad_records: str = ""  # summary of the skipped records and files


def write_token_file(job_file: Path | None, overrides: list[str], out: Path) -> str:
    """Encodes a job's source into a token file; returns a summary for the terminal."""
    summary = encode_source(load_job(job_file, overrides).data, out)
    size = f"{pluralize(summary.documents, 'document')}, {summary.text_bytes:,} bytes of text"
    message = f"{out}: {summary.tokens:,} tokens (vocabulary {summary.vocab:,}) from {size}"
    if summary.tokenizer is not None:
        message += f"\n{summary.tokenizer}: tokenizer trained on this text; set data.tokenizer to this path"
    return f"{message}\n{summary.bad_records}" if summary.bad_records else message


def encode_source(data: DataConfig, out: Path) -> EncodingSummary:
    """Encodes the source's text into a token file; trains a `bpe:SIZE` tokenizer and saves it next to the file."""
    if data.source not in ("stdlib", "text", "jsonl"):
        raise DataError(f"data.source = {data.source!r} has no text to encode; use stdlib, text or jsonl.")
    files = find_files(data.source, data.path)
    require_parent_folder(out)
    if any(out.exists() and file.exists() and out.samefile(file) for file in files):
        raise DataError(f"{out} is one of the files to read; the tokens would overwrite it. Name another.")
    if out.exists() and not out.is_file():
        raise DataError(f"{out} is not a regular file; name a file to write the tokens to.")
    tokenizer_path = out.with_suffix(".tokenizer.json") if parse_bpe_size(data.tokenizer) else None
    if tokenizer_path:
        tokenizer_path.unlink(missing_ok=True)  # it may have been trained on other text
    bad_records = BadRecords(data.on_bad_record == "skip")
    extents = DataRecord().take(files)
    tokenizer = load_or_train_tokenizer(data, extents, tokenizer_path, bad_records)
    summary = encode_files(data, extents, tokenizer, out, bad_records)
    notes = "\n".join(filter(None, (bad_records.summary(), bad_records.skipped_text())))
    return replace(summary, tokenizer=tokenizer_path, bad_records=notes)


def encode_files(
    data: DataConfig, files: Sequence[DataFile], tokenizer: Tokenizer, out: Path, bad_records: BadRecords
) -> EncodingSummary:
    documents = encoded_bytes = 0

    def arrays() -> Iterator[np.ndarray]:
        nonlocal documents, encoded_bytes
        eos = np.array([tokenizer.eos_id], np.uint32)
        for chunks in _batch_chunks(_read_source(data, files, bad_records)):
            texts = [chunk.text for chunk in chunks]
            for chunk, ids in zip(chunks, tokenizer.encode_batch(texts), strict=True):
                yield ids
                if chunk.ends_document:
                    yield eos
            documents += sum(chunk.ends_document for chunk in chunks)
            encoded_bytes += sum(len(text.encode()) for text in texts)
        if not documents:
            contents = f"{pluralize(len(files), 'file')}, empty or binary"
            raise DataError(f"{describe_source(data)} has no text: {contents}. Use another path.")

    token_file = write_token_arrays(out, arrays(), tokenizer.vocab)
    return EncodingSummary(token_file.count, documents, encoded_bytes, tokenizer.vocab)


def _read_source(data: DataConfig, files: Sequence[DataFile], bad_records: BadRecords) -> Iterator[TextChunk]:
    return read_chunks(data.source, data.path, data.text_field, files, bad_records)


def _batch_chunks(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    batch: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += len(chunk.text)
        if size >= ENCODE_BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def load_or_train_tokenizer(
    data: DataConfig, files: Sequence[DataFile], tokenizer_path: Path | None, bad_records: BadRecords
) -> Tokenizer:
    """Returns the job's tokenizer. A `bpe:SIZE` tokenizer is trained on first use and saved at `tokenizer_path`."""
    size = parse_bpe_size(data.tokenizer)
    if size is None or tokenizer_path is None:
        return load_tokenizer(data.tokenizer)
    if not tokenizer_path.exists():
        stride = -(-sum(file.size for file in files) // MAX_BPE_TRAINING_BYTES)
        chunks = islice(_read_source(data, files, bad_records), 0, None, max(1, stride))
        train_bpe((chunk.text for chunk in chunks), size).save(tokenizer_path)
    return load_tokenizer(str(tokenizer_path))


def describe_source(data: DataConfig) -> str:
    return f"data.source = {data.source!r}" if data.source == "stdlib" else f"data.path = {data.path!r}"
