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

from shardwise.data.bad import Bad
from shardwise.errors import DataError, nearest

PIECE = 1 << 20
_ENDINGS = {"text": (), "jsonl": (".jsonl", ".ndjson"), "tokens": (".bin",)}
"""What a folder is searched for; empty: everything."""


class Piece(NamedTuple):
    text: str
    ends: bool
    """Whether the document ends here."""


def find_files(source: str, path: str) -> list[Path]:
    """The files of a source, sorted; at least one."""
    if source == "stdlib":
        return _stdlib()
    if not path:
        raise DataError(f"data.source = {source!r} needs data.path: a file, a folder or a glob.")
    whole = os.path.expanduser(path)
    if os.path.isfile(whole):
        return [Path(whole)]
    if os.path.isdir(whole):
        found = [file for file in _below(Path(whole)) if file.name.endswith(_ENDINGS[source] or "")]
        wanted = f" that end in {' or '.join(_ENDINGS[source])}" if _ENDINGS[source] else ""
        remedy = f"The folder has no files{wanted}"
    else:
        found = [Path(name) for name in sorted(glob.glob(whole, recursive=True)) if os.path.isfile(name)]
        remedy = "No file matches" if glob.has_magic(whole) else f"There is no such file or folder (from {os.getcwd()})"
    if not found:
        raise DataError(f"data.path = {path!r} leads to nothing. {remedy}; give a file, a folder or a glob.")
    return found


def _below(folder: Path, passed_over: Iterable[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        # In place: this is how os.walk is told where to go, and in which order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in passed_over)
        yield from (Path(here, name) for name in sorted(names) if not name.startswith("."))


def _stdlib() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    passed_over = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    found = [
        file
        for file in _below(folder, passed_over)
        # The build's own settings differ from machine to machine, the rest only with the version of Python.
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and not file.parent.name.startswith("config-")
    ]
    if not found:
        raise DataError(f"this Python keeps no source of its standard library in {folder}; use data.source = 'text'.")
    return found


def read_pieces(source: str, path: str, field: str, files: Sequence[Path], bad: Bad | None = None) -> Iterator[Piece]:
    """The text of `files`, document by document."""
    named = source == "text" and os.path.isfile(os.path.expanduser(path))
    for file in files:
        try:
            if source == "jsonl":
                yield from _records(file, field, bad or Bad())
            elif _is_text(file):
                yield from _pieces(file)
            elif named:
                raise DataError(
                    f"{file} is not text: it must be UTF-8 without NUL bytes. Convert it, for instance with iconv."
                )
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from error


def _is_text(path: Path) -> bool:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        try:
            while chunk := file.read(PIECE):
                if b"\0" in chunk:
                    return False
                decode(chunk)
            decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def _pieces(path: Path) -> Iterator[Piece]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read(PIECE) + file.readline(PIECE)
        while text:
            after = file.read(PIECE) + file.readline(PIECE)
            yield Piece(text, ends=not after)
            text = after


def _records(path: Path, field: str, bad: Bad) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = _record(line, field, f"{path}, line {number}") if line.strip() else ""
            except DataError as error:
                bad.tell(error)
                continue
            if text:
                yield Piece(text, ends=True)


def _record(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}). Every line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}. Every line must be one JSON object.")
    if field not in record:
        raise DataError(f"{where}: the record has no field {field!r} (data.field); {nearest(field, map(str, record))}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {field!r} holds a {type(text).__name__}, not a string; choose another data.field."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {field!r} is not Unicode text ({error.reason}); mend or drop the record."
        ) from None
    return text
