"""The errors that Shardwise raises on purpose. A message says what is wrong, the bad value, the rule and the remedy.

Who writes `tp=2` in a layout or `gradient_accumulation_steps` in a job knows what it wants: the error for a key of
another framework names our key, from the tables of `peer_words.toml`."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path

EXIT_UNFINISHED = 75  # of `train --continue`: the run was stopped and wants to be started again (EX_TEMPFAIL)
_TABLES = tomllib.loads(Path(__file__).with_name("peer_words.toml").read_text(encoding="utf-8"))
LAYOUT_WORDS, JOB_WORDS = _TABLES["layout"], _TABLES["job"]
_BY_LAYOUT_WORD = {word: answer for answer, words in LAYOUT_WORDS.items() for word in words.split()}
_BY_JOB_WORD = {word: answer for answer, words in JOB_WORDS.items() for word in words.split()}


class ShardwiseError(Exception):
    exit_code = 1


class UserError(ShardwiseError):
    """The user can fix it: exit code 2, one or two sentences, no traceback."""

    exit_code = 2


class JobError(UserError):
    """A wrong key or value in the job file."""


class LayoutError(UserError):
    """An impossible layout."""


class DataError(UserError):
    """Unreadable or unsuitable training data."""


class CheckpointError(UserError):
    """No loadable checkpoint."""


class StoreError(UserError):
    """An object store that cannot be read or written."""


class RunError(ShardwiseError):
    """Something failed during a run: exit code 1."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns a clause that suggests the known word closest to a mistyped one, or lists them (thirty at most)."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known[:30])}{', ...' if len(known) > 30 else '.'}"


def shorten(value: object, limit: int = 80) -> str:
    """Returns the `repr` of a value for a message, cut off after `limit` characters."""
    is_long = isinstance(value, int) and value.bit_length() > 256  # Python refuses to print thousands of digits
    text = "a huge integer" if is_long else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def layout_hint(key: str, value: str = "") -> str | None:
    """Returns our form of another framework's layout key ("did you mean tensor=2?"), or None for an unknown word."""
    word = _normalize(key)
    if word in _BY_LAYOUT_WORD:
        return f"did you mean {_layout_form(word, value)}?"
    return job_hint(key) if word in _BY_JOB_WORD else None


def job_hint(key: str, value: object = "") -> str | None:
    """Returns our form of another framework's job key ("did you mean model.width?"), or None for an unknown word."""
    word = _normalize(key)
    if word in _BY_JOB_WORD:
        answer = _BY_JOB_WORD[word]
        return answer[0].lower() + answer[1:] if answer.endswith(".") else f"did you mean {answer}?"
    if word in _BY_LAYOUT_WORD:
        return f"it belongs to the layout; did you mean {_layout_form(word, value)} in layout?"
    return None


def _normalize(key: str) -> str:
    return key.strip().lstrip("-").lower().replace("-", "_")


def _layout_form(word: str, value: object) -> str:
    is_degree = not isinstance(value, bool) and str(value).isdigit()
    return _BY_LAYOUT_WORD[word].replace("{n}", str(value) if is_degree else "N")
