"""Finds the files of a text source and reads their documents, in a fixed order.

    stdlib   the source code of the running Python's standard library: a corpus that every machine has
    text     a file, a folder (all non-hidden text files below it) or a glob; one document per file
    jsonl    like text, but each line is a JSON object whose field `data.text_field` is a document

A text file is UTF-8 without NUL bytes. Other files in a folder or glob are skipped and named; if `data.path` names one,
it is an error. Text files are read in chunks of at most 2 x CHUNK_CHARS characters that end at line breaks where
possible; a JSONL record is read whole.
"""

import codecs
import glob
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.data.bad_records import BadRecords
from shardwise.data.fingerprint import DataFile
from shardwise.errors import DataError, suggest

CHUNK_CHARS = 1 << 20
_SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson"), "tokens": (".bin",)}
"""File name suffixes that a folder search accepts; an empty tuple accepts all."""

_JSON_TYPES = {
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip


class TextChunk(NamedTuple):
    text: str
    ends_document: bool


def find_files(source: str, path: str) -> list[Path]:
    """Returns the files of a source in a fixed order; raises DataError if there are none."""
    if source == "stdlib":
        return _stdlib_files()
    if not path:
        raise DataError(f"data.source = {source!r} needs data.path: a file, a folder or a glob.")
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [Path(expanded)]
    if os.path.isdir(expanded):
        files = [file for file in _walk_files(Path(expanded)) if file.name.endswith(_SUFFIXES[source] or "")]
        suffixes = f" that end in {' or '.join(_SUFFIXES[source])}" if _SUFFIXES[source] else ""
        problem = f"the folder has no files{suffixes}"
    else:
        files = [Path(name) for name in sorted(glob.glob(expanded, recursive=True)) if os.path.isfile(name)]
        problem = "no file matches" if glob.has_magic(expanded) else f"no such file or folder (from {os.getcwd()})"
    if not files:
        raise DataError(f"data.path = {path!r}: {problem}; give a file, a folder or a glob.")
    return files


def _walk_files(folder: Path, excluded: Iterable[str] = ()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # Assigned in place, which is how os.walk prunes and orders its traversal.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in excluded)
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    excluded = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    files = [file for file in _walk_files(folder, excluded) if file.suffix == ".py"]
    # Build settings differ between machines, all other files only between versions of Python.
    files = [file for file in files if not file.parent.name.startswith("config-")]
    files = [file for file in files if not file.name.startswith("_sysconfigdata")]
    if not files:
        raise DataError(f"the source code of the standard library is not in {folder}; use data.source = 'text'.")
    return files


def read_chunks(
    source: str, path: str, field: str, files: Sequence[DataFile], bad_records: BadRecords | None = None
) -> Iterator[TextChunk]:
    """Yields the text of `files`, document by document."""
    is_named_file = source == "text" and os.path.isfile(os.path.expanduser(path))
    bad_records = bad_records or BadRecords()
    for file in files:
        try:
            if source == "jsonl":
                yield from _read_jsonl_file(file, field, bad_records)
            elif _is_text(file):
                yield from _read_text_file(file)
            elif is_named_file:
                where = file.path
                raise DataError(
                    f"{where} is not text: it must be UTF-8 without NUL bytes. Convert it, e.g. with iconv."
                )
            else:
                bad_records.skipped_files[str(file.path)] = None
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error.strerror}.") from error


def _is_text(extent: DataFile) -> bool:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with extent.open() as file:
        try:
            while chunk := file.read(CHUNK_CHARS):  # here bytes
                if b"\0" in chunk:
                    return False
                decode(chunk)
            decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _read_text_file(extent: DataFile) -> Iterator[TextChunk]:
    with io.TextIOWrapper(extent.open(), encoding="utf-8-sig", newline="") as file:
        text = file.read(CHUNK_CHARS) + file.readline(CHUNK_CHARS)
        while text:
            next_text = file.read(CHUNK_CHARS) + file.readline(CHUNK_CHARS)
            yield TextChunk(text, ends_document=not next_text)
            text = next_text


def _read_jsonl_file(extent: DataFile, field: str, bad_records: BadRecords) -> Iterator[TextChunk]:
    with extent.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                text = _parse_record(line, field, f"{extent.path}, line {number}") if line.strip() else ""
            except DataError as error:
                bad_records.report(error)
                continue
            if text:
                yield TextChunk(text, ends_document=True)


def _parse_record(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}). Every line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: this is a JSON {_JSON_TYPES[type(record)]}. Every line must be one JSON object.")
    if field not in record:
        reason = f"the record has no field {field!r} (data.text_field)"
        raise DataError(f"{where}: {reason}; {suggest(field, map(str, record))}")
    text = record[field]
    if not isinstance(text, str):
        kind = _JSON_TYPES[type(text)]
        raise DataError(f"{where}: field {field!r} is a JSON {kind}, not a string; set data.text_field.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"field {field!r} is not Unicode text ({error.reason})"
        raise DataError(f"{where}: {reason}; fix or drop the record.") from None
    return text
