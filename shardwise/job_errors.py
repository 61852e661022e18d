"""Pydantic's validation errors of a job as sentences, with the key that was probably meant."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from shardwise.errors import shorten, suggest
from shardwise.models.registry import families, named_family
from shardwise.peer_words import job_hint


def describe_problems(problems: Sequence[Any], family: str, job: type[BaseModel]) -> list[str]:
    """Returns one sentence per key; `family`: that of the job's model, `job`: the model whose validation failed."""
    messages: dict[str, list[str]] = {}
    for problem in problems:
        path, _, message = _format_problem(problem, family, job).partition(": ")
        messages.setdefault(path, []).append(message)
    # Pydantic reports each member of a union type as its own problem; join them into one sentence.
    joined = {path: ", or ".join([*(t.rstrip(".") for t in texts[:-1]), texts[-1]]) for path, texts in messages.items()}
    return [f"{path}: {text}".removesuffix(": ") for path, text in joined.items()]


def _format_problem(problem: Any, family: str, job: type[BaseModel]) -> str:
    """Returns a pydantic error as a sentence; `family` is the family of the job's model."""
    location = list(problem["loc"])
    if problem["type"] == "extra_forbidden":
        hint = job_hint(str(location[-1]), problem["input"]) or _suggest_key(location, family, job)
        return f"unknown key {'.'.join(map(str, location))!r}; {hint}"
    # For a union, pydantic appends the member type to the location; it is not part of the key.
    type_names = ("bool", "int", "float", "str", "constrained-int", "constrained-float")
    location = [part for part in location if part not in type_names and "[" not in str(part)]
    path = ".".join(map(str, location))
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    message += "" if message.endswith("?") else "."
    if problem["type"] == "value_error":
        return f"{path}: {message}" if path else message
    if problem["type"] == "missing":
        return f"{path}: a value is required."
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{path} = {shorten(problem['input'])}: {path} is a section, not a value; set its keys below [{path}]."
    return f"{path} = {shorten(problem['input'])}: {message.replace('Input should', 'should')}"


def _suggest_key(location: list[str | int], family: str, job: type[BaseModel]) -> str:
    """Suggests the key that was probably meant, and says which other model families have this key."""
    *sections, key = map(str, location)
    if not sections:
        return suggest(key, job.model_fields)
    if sections[0] != "model":
        section: Any = job.model_fields[sections[0]].annotation
        return suggest(key, section.model_fields)
    others = [repr(name) for name, other in families().items() if key in other.config.model_fields]
    suggestion = suggest(key, named_family(family).config.model_fields)
    return f"it is a key of {' and '.join(others)}, not of {family!r}; {suggestion}" if others else suggestion
