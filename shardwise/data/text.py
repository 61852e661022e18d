"""From files to text: which files a source means, and the documents in them, in an order that does not change.

    stdlib   the source of the running Python's own standard library: a corpus that is on every machine
    text     a file, a folder (every text file below it, hidden ones apart) or a glob; one document per file
    jsonl    the same, one JSON object per line; a record's field is a document

A text file is one that is UTF-8 without NUL bytes. Folders and globs may hold others, which are passed over; a file
that was named must be one. Documents come in pieces of at most 2 Mi characters, cut at ends of lines, so that memory
stays bounded whatever the size of a file.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.data.bad_records import BadRecords
from shardwise.errors import DataError, suggest

CHUNK_CHARS = 1 << 20
_SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson"), "tokens": (".bin",)}
"""What a folder is searched for; empty: everything."""


class TextChunk(NamedTuple):
    text: str
    ends_document: bool
    """Whether the document ends here."""


def find_files(source: str, path: str) -> list[Path]:
    """The files of a source, sorted; at least one."""
    if source == "stdlib":
        return _stdlib_files()
    if not path:
        raise DataError(f"data.source = {source!r} needs data.path: a file, a folder or a glob.")
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return [Path(expanded)]
    if os.path.isdir(expanded):
        found = [file for file in _walk_files(Path(expanded)) if file.name.endswith(_SUFFIXES[source] or "")]
        wanted = f" that end in {' or '.join(_SUFFIXES[source])}" if _SUFFIXES[source] else ""
        remedy = f"The folder has no files{wanted}"
    else:
        found = [Path(name) for name in sorted(glob.glob(expanded, recursive=True)) if os.path.isfile(name)]
        remedy = (
            "No file matches" if glob.has_magic(expanded) else f"There is no such file or folder (from {os.getcwd()})"
        )
    if not found:
        raise DataError(f"data.path = {path!r} leads to nothing. {remedy}; give a file, a folder or a glob.")
    return found


def _walk_files(folder: Path, excluded: Iterable[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        # In place: this is how os.walk is told where to go, and in which order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in excluded)
        yield from (Path(here, name) for name in sorted(names) if not name.startswith("."))


def _stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    excluded = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    found = [
        file
        for file in _walk_files(folder, excluded)
        # The build's own settings differ from machine to machine, the rest only with the version of Python.
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and not file.parent.name.startswith("config-")
    ]
    if not found:
        raise DataError(f"this Python keeps no source of its standard library in {folder}; use data.source = 'text'.")
    return found


def read_chunks(
    source: str, path: str, field: str, files: Sequence[Path], bad_records: BadRecords | None = None
) -> Iterator[TextChunk]:
    """The text of `files`, document by document."""
    is_named_file = source == "text" and os.path.isfile(os.path.expanduser(path))
    for file in files:
        try:
            if source == "jsonl":
                yield from _read_jsonl_file(file, field, bad_records or BadRecords())
            elif _is_text(file):
                yield from _read_text_file(file)
            elif is_named_file:
                raise DataError(
                    f"{file} is not text: it must be UTF-8 without NUL bytes. Convert it, for instance with iconv."
                )
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from error


def _is_text(path: Path) -> bool:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        try:
            while chunk := file.read(CHUNK_CHARS):
                if b"\0" in chunk:
                    return False
                decode(chunk)
            decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _read_text_file(path: Path) -> Iterator[TextChunk]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read(CHUNK_CHARS) + file.readline(CHUNK_CHARS)
        while text:
            next_text = file.read(CHUNK_CHARS) + file.readline(CHUNK_CHARS)
            yield TextChunk(text, ends_document=not next_text)
            text = next_text


def _read_jsonl_file(path: Path, field: str, bad_records: BadRecords) -> Iterator[TextChunk]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = _parse_record(line, field, f"{path}, line {number}") if line.strip() else ""
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
        raise DataError(f"{where}: a JSON {type(record).__name__}. Every line must be one JSON object.")
    if field not in record:
        raise DataError(
            f"{where}: the record has no field {field!r} (data.text_field); {suggest(field, map(str, record))}"
        )
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {field!r} holds a {type(text).__name__}, not a string; choose another data.text_field."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} is not Unicode text ({error.reason}); mend or drop the record."
        ) from None
    return text
