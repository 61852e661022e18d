"""Keys of other frameworks, and what Shardwise calls them: the tables of `peer_words.toml`.

Someone who writes `tp=2` in a layout or `gradient_accumulation_steps` in a job knows what they want; the error for the
unknown key names our key."""

import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LAYOUT_WORDS, JOB_WORDS = _TABLES["layout"], _TABLES["job"]
_BY_LAYOUT_WORD = {word: answer for answer, words in LAYOUT_WORDS.items() for word in words.split()}
_BY_JOB_WORD = {word: answer for answer, words in JOB_WORDS.items() for word in words.split()}
BY_COMMAND_WORD = {word: answer for answer, words in _TABLES["command"].items() for word in words.split()}


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
