"""The errors that Shardwise raises on purpose. A message says what is wrong, the bad value, the rule and the remedy."""

import difflib
from collections.abc import Iterable

EXIT_UNFINISHED = 75  # of `train --continue`: the run was stopped and wants to be started again (EX_TEMPFAIL)


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


class WorkerError(RunError):
    """A process raised what nobody foresaw; its traceback is the message, and `cause` one sentence."""

    def __init__(self, message: str, cause: str):
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class StoppedError(RunError):
    """A run was asked to stop and could not save."""


class RepeatedFailure(RunError):
    """A run that failed for the same cause at the same step each time: exit code 2."""

    exit_code = 2  # a person is needed; after 1, schedulers may start it once more


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns a clause that suggests the known words that begin with a given one or, if none does, the one closest to
    it; or lists them all (thirty at most)."""
    known = list(known)
    begun = [one for one in known if len(word) > 2 and one.startswith(word.lower())]
    if close := begun[:3] or difflib.get_close_matches(word, known, n=1, cutoff=0.6):
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known: {', '.join(known[:30])}{', ...' if len(known) > 30 else '.'}"


def shorten(value: object, limit: int = 80) -> str:
    """Returns a value's `repr` for a message, cut off after `limit` characters. Python prints no huge integers."""
    text = "a huge integer" if isinstance(value, int) and value.bit_length() > 256 else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
