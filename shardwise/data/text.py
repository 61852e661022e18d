"""Text sources: finds their files, reads the documents in a fixed order, and encodes them into a token file.

    stdlib     the source code of the running Python's standard library: a corpus that every machine has
    text       a file, a folder (all non-hidden text files below it) or a glob; one document per file; of a tar shard
               (WebDataset) one per sample: its .txt file, or else the field `data.text_field` of its .json file
    jsonl      like text, but each line is a JSON object whose field `data.text_field` is a document
    parquet    rows of tables, whose column `data.text_field` is a document
    datasets   the same of Arrow files and streamed datasets

Text files are read in chunks of at most 2 x CHUNK_CHARS characters that end at line breaks where possible."""

import glob
import io
import json
import os
import re
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.console import pluralize
from shardwise.data.input_files import DECOMPRESSORS, BadRecords, DataFile, DataRecord
from shardwise.data.table_files import STREAM, read_rows, stream_rows
from shardwise.data.token_file import RAW_DTYPES, write_token_arrays
from shardwise.data.tokenizer import Tokenizer, load_tokenizer, parse_bpe_size, train_bpe
from shardwise.errors import DataError, shorten, suggest
from shardwise.files import os_errors_as, require_parent_folder
from shardwise.job import DataConfig

CHUNK_CHARS = 1 << 20
MAX_BPE_TRAINING_BYTES = 128 << 20  # sampled evenly, to train BPE on; more takes hours and hardly changes it
ENCODE_BATCH_CHARS = 8 << 20  # characters per call of the tokenizer
TAR = re.compile(rf"\.tar({'|'.join(map(re.escape, DECOMPRESSORS))})?$")
ROW_SOURCES = ("jsonl", "parquet", "datasets")  # each of their rows is a document
TEXT_SOURCES = ("stdlib", "text", *ROW_SOURCES)
_LINES = (".jsonl", ".ndjson", *(f"{kind}{end}" for kind in (".jsonl", ".ndjson", ".json") for end in DECOMPRESSORS))
_SUFFIXES = {"text": ("",), "jsonl": _LINES, "chat": _LINES, "tokens": (".bin",)}
_SUFFIXES |= {"parquet": (".parquet",), "datasets": (".arrow",), "images": (".tar",)}
"""File name suffixes that a folder search accepts; `.json` alone is a document, but compressed it is lines (C4)."""


class TextChunk(NamedTuple):
    text: str
    ends_document: bool


def source_by_name(name: str) -> tuple[str, str]:
    """Returns the source and the path that a name stands for: a prefix (`jsonl:folder`) or else its suffix says it."""
    kind, colon, path = name.partition(":")
    if name == "stdlib" or (colon and kind in (*TEXT_SOURCES, "tokens")):
        return kind, path
    plain = "x.bin" if name.endswith(tuple(f".bin:{kind}" for kind in RAW_DTYPES)) else name
    found = next((kind for kind in (*ROW_SOURCES, "tokens") if plain.endswith(_SUFFIXES[kind])), "text")
    return "datasets" if name.startswith(STREAM) else found, name


def find_files(source: str, path: str) -> list[Path]:
    """Returns the files of a source in a fixed order; raises DataError if there are none."""
    if source == "stdlib":
        return _stdlib_files()
    if source == "datasets" and path.startswith(STREAM):
        return []
    if not path:
        raise DataError(f"data.source = {source!r} needs data.path: a file, a folder or a glob.")
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [Path(expanded)]
    if os.path.isdir(expanded):
        if os.path.isfile(f"{expanded}/dataset_dict.json"):  # which split is for training is the user's to say
            raise DataError(f"data.path = {path!r} has several splits; name one, for example {path}/train.")
        ends = re.compile(rf"(?!cache-.*\.arrow$).*({'|'.join(map(re.escape, _SUFFIXES[source]))})", re.DOTALL)
        files = [file for file in walk_files(Path(expanded)) if ends.fullmatch(file.name)]
        suffixes = f" that end in {' or '.join(_SUFFIXES[source][:2])}" if source != "text" else ""
        problem = f"the folder has no files{suffixes}"
    else:
        files = [Path(name) for name in sorted(glob.glob(expanded, recursive=True)) if os.path.isfile(name)]
        problem = "no file matches" if glob.has_magic(expanded) else f"no such file or folder (from {os.getcwd()})"
    if not files:
        raise DataError(f"data.path = {path!r}: {problem}; give a file, a folder or a glob.")
    return files


def walk_files(folder: Path, excluded: Iterable[str] = ()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # Assigned in place, which is how os.walk prunes and orders its traversal.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in excluded)
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    excluded = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    # Build settings differ between machines, all other files only between versions of Python.
    is_built = lambda file: file.parent.name.startswith("config-") or file.name.startswith("_sysconfigdata")  # noqa: E731
    files = [file for file in walk_files(folder, excluded) if file.suffix == ".py" and not is_built(file)]
    if not files:
        raise DataError(f"the source code of the standard library is not in {folder}; use data.source = 'text'.")
    return files


def read_chunks(data: DataConfig, files: Sequence[DataFile], bad: BadRecords | None = None) -> Iterator[TextChunk]:
    """Yields the text of `files`, document by document."""
    is_named_file = data.source == "text" and os.path.isfile(os.path.expanduser(data.path))
    bad_records = bad or BadRecords()
    if data.path.startswith(STREAM):
        yield from _read_texts(stream_rows(data), data.text_field, bad_records)
    for file in files:
        with os_errors_as(DataError, f"{file.path} cannot be read"):
            if data.source in ROW_SOURCES:
                rows = read_lines(file) if data.source == "jsonl" else read_rows(file.path, data.text_field)
                yield from _read_texts(rows, data.text_field, bad_records)
            elif TAR.search(file.path.name):
                yield from _read_texts(_read_tar(file, data.text_field), data.text_field, bad_records)
            elif _is_text(file):
                yield from _read_text_file(file)
            elif is_named_file:
                kind = source_by_name(file.path.name)[0]
                remedy = "Convert it with iconv." if kind == "text" else f"For such files set data.source = {kind!r}."
                raise DataError(f"{file.path} is not text: it must be UTF-8 without NUL bytes. {remedy}")
            else:
                bad_records.skipped_files[str(file.path)] = None


def _is_text(extent: DataFile) -> bool:
    with io.TextIOWrapper(extent.open(), encoding="utf-8", newline="") as file, suppress(UnicodeDecodeError):
        return all("\0" not in text for text in iter(lambda: file.read(CHUNK_CHARS), ""))
    return False


def _read_text_file(extent: DataFile) -> Iterator[TextChunk]:
    with io.TextIOWrapper(extent.open(), encoding="utf-8-sig", newline="") as file:
        texts = iter(lambda: file.read(CHUNK_CHARS) + file.readline(CHUNK_CHARS), "")
        for text, following in pairwise(chain(texts, [""])):
            yield TextChunk(text, ends_document=not following)


def read_lines(extent: DataFile) -> Iterator[tuple[str, bytes]]:
    with extent.open() as file:
        yield from ((f"{extent.path}, line {number}", line) for number, line in enumerate(file, 1) if line.strip())


def _read_tar(extent: DataFile, field: str) -> Iterator[tuple[str, Any]]:
    """Yields the samples of a tar shard of WebDataset, each the files of one name that follow each other."""
    try:
        with tarfile.open(fileobj=extent.open(), mode="r|") as tar:
            read = (m for m in tar if m.isreg() and m.name.endswith((".txt", ".json")))
            for name, members in groupby(read, lambda member: re.sub(r"\.[^/]*$", "", member.name)):
                found = {Path(m.name).suffix: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]
                text = found.get(".txt", b"").decode("utf-8-sig", "surrogateescape")
                yield f"{extent.path}, {name}", {field: text} if ".txt" in found else found[".json"]
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{extent.path} cannot be read as a tar file: {error}. Copy it again.") from None


def _read_texts(rows: Iterable[tuple[str, Any]], field: str, bad_records: BadRecords) -> Iterator[TextChunk]:
    """Yields the text of each row, a dict or a line of JSON, which comes with words that say where it is."""
    for where, row in rows:
        try:
            if text := _text_of(parse_object(row) if isinstance(row, bytes) else row, field):
                yield TextChunk(text, ends_document=True)
        except DataError as error:
            bad_records.report(DataError(f"{where}: {error}"))


def parse_object(line: bytes) -> dict[str, Any]:
    """Returns the JSON object of a line; raises DataError if it is none."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error}). Every line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise DataError(f"this is no JSON object: {shorten(record)}. Every line must be one.")
    return record


def _text_of(record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise DataError(f"no field {field!r} (data.text_field); {suggest(field, map(str, record))}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"field {field!r} is {shorten(text)}, not a string; set data.text_field.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"field {field!r} is not Unicode text ({error.reason}); fix or drop it.") from None
    return text


def encode_source(data: DataConfig, out: Path) -> str:
    """Encodes the source's text into a token file, and saves a `bpe:SIZE` tokenizer beside it. Returns what it did."""
    if data.source not in TEXT_SOURCES:
        raise DataError(f"data.source = {data.source!r} has no text to encode; use one of {', '.join(TEXT_SOURCES)}.")
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
    tokenizer = load_or_train_bpe(data, extents, tokenizer_path, bad_records)
    lines = [encode_files(data, extents, tokenizer, out, bad_records)]
    if tokenizer_path:
        lines.append(f"{tokenizer_path}: tokenizer trained on this text; set data.tokenizer to this path")
    return "\n".join(filter(None, (*lines, bad_records.summary(), bad_records.skipped_text())))


def encode_files(data: DataConfig, files: Sequence[DataFile], tokenizer: Tokenizer, out: Path, bad: BadRecords) -> str:
    """Writes the token file `out`; returns what it holds."""
    documents = encoded_bytes = 0

    def arrays() -> Iterator[np.ndarray]:
        nonlocal documents, encoded_bytes
        eos = np.array([tokenizer.eos_id], np.uint32)
        for chunks in _batch_chunks(read_chunks(data, files, bad)):
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
    size = f"{pluralize(documents, 'document')}, {encoded_bytes:,} bytes of text"
    return f"{out}: {token_file.count:,} tokens (vocabulary {tokenizer.vocab:,}) from {size}"


def _batch_chunks(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    sized = ((len(chunk.text), chunk) for chunk in chunks)
    ends = accumulate(sized, lambda before, one: (before[0] + one[0], one[1]))  # characters up to each, and it
    return ([chunk for _, chunk in group] for _, group in groupby(ends, lambda one: one[0] // ENCODE_BATCH_CHARS))


def load_or_train_bpe(data: DataConfig, files: Sequence[DataFile], path: Path | None, bad: BadRecords) -> Tokenizer:
    """Returns the job's tokenizer. A `bpe:SIZE` tokenizer is trained on first use and saved at `path`."""
    size = parse_bpe_size(data.tokenizer)
    if size is None or path is None:
        return load_tokenizer(data.tokenizer)
    if not path.exists():
        stride = -(-sum(file.size for file in files) // MAX_BPE_TRAINING_BYTES)
        chunks = islice(read_chunks(data, files, bad), 0, None, max(1, stride))
        train_bpe((chunk.text for chunk in chunks), size).save(path)
    return load_tokenizer(str(path))


def describe_source(data: DataConfig) -> str:
    return f"data.source = {data.source!r}" if data.source == "stdlib" else f"data.path = {data.path!r}"
