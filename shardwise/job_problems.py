"""What is wrong with a job, in sentences: pydantic's errors by key, with the key that was probably meant."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from shardwise.errors import shorten, suggest
from shardwise.models.registry import families, named_family
from shardwise.peer_words import job_hint

IS_OFF = "it is switched off; leave it out."
PLAINER = {", unable to interpret input": "", ", unable to parse string as an integer": "", "a valid string": "text",
           "a valid boolean": "true or false", "a valid integer": "a whole number",
           "a valid tuple": "a list in [ ]"}  # fmt: skip


def describe_problems(problems: Sequence[Any], family: str, fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns pydantic's errors as keys and sentences; `family`: that of the job's model, `fields`: the job's."""
    messages: dict[str, list[str]] = {}
    keys: dict[str, str] = {}
    for index, problem in enumerate(problems := list(problems)):
        if problem["type"] == "extra_forbidden" and isinstance(problem["input"], Mapping):
            # Another framework's section, perhaps: its keys follow, if its answer does not answer them too.
            told = _hint(problem["loc"], problem["input"]) or "there is no such section"
            inner = [{**problem, "loc": (*problem["loc"], k), "input": v} for k, v in problem["input"].items()
                     if told.startswith("there is no") or job_hint(k, v) or isinstance(v, Mapping)]  # fmt: skip
            problems[index + 1 : index + 1] = inner if not told.startswith(("leave it out", IS_OFF)) else []
        path, _, message = _format_problem(problem, family, fields).partition(": ")
        keys[path] = ".".join(_location(problem))
        if message not in messages.setdefault(path, []):
            messages[path].append(message)
    # Pydantic reports each member of a union type as its own problem; join them into one sentence.
    joined = {path: ", or ".join([*(t.rstrip(".") for t in texts[:-1]), texts[-1]]) for path, texts in messages.items()}
    return [(keys[path], f"{path}: {text}".removesuffix(": ")) for path, text in joined.items()]


def _location(problem: Any) -> list[str]:
    """Returns the parts of a problem's key; for a union, pydantic appends the member type."""
    type_names = ("bool", "int", "float", "str", "constrained-int", "constrained-float")
    return [str(part) for part in problem["loc"] if part not in type_names and "[" not in str(part)]


def _hint(location: Sequence[str | int], value: object = "") -> str:
    """Returns our form of another framework's key, looked up with its section first; empty if it is unknown."""
    if isinstance(value, Mapping) and value.get("enabled") is False:
        return IS_OFF
    words = ".".join(map(str, location[-2:])), str(location[-1])
    return next(filter(None, (job_hint(word, value) for word in words)), "")


def _format_problem(problem: Any, family: str, fields: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        location = list(problem["loc"])
        hint = _hint(location, problem["input"]) or _suggest_key(location, family, fields)
        return f"unknown key {shorten('.'.join(map(str, location)))}; {hint}"
    path, message = ".".join(_location(problem)), problem["msg"].removeprefix("Value error, ").rstrip(".")
    for theirs, ours in PLAINER.items():
        message = message.replace(theirs, ours)
    message += "" if message.endswith("?") else "."
    if problem["type"] == "value_error":
        return f"{path}: {message}" if path not in ("", "layout") else message
    if problem["type"] == "missing":
        return f"{path}: a value is required."
    if isinstance(problem["input"], Mapping) and path in fields:
        return f"{path}: it is a value, not a section; set {path} = ... above the first section."
    if problem["type"] == "dict_type":
        return f'{path} = {shorten(problem["input"])}: it needs a table, such as {{ name = "value" }}.'
    if problem["type"] in ("model_type", "model_attributes_type"):
        section = getattr(fields.get(path), "annotation", None)
        name = f", such as {path}.name" * ("name" in getattr(section, "model_fields", {}))
        return f"{path} = {shorten(problem['input'])}: it is a section, not a value; set its keys below [{path}]{name}."
    return f"{path} = {shorten(problem['input']).replace(': ', ' = ')}: {message.replace('Input should', 'should')}"


def _suggest_key(location: list[str | int], family: str, fields: Mapping[str, Any]) -> str:
    """Suggests the key that was probably meant, and says which other model families have this key."""
    *sections, key = map(str, location)
    in_model = sections[:1] == ["model"]
    keys: Any = named_family(family).config.model_fields if in_model else fields
    for section in sections[in_model:]:
        kind = keys[section].annotation if section in keys else None
        keys = next((one.model_fields for one in (kind, *get_args(kind)) if hasattr(one, "model_fields")), keys)
    if sections and sections[0] not in fields and key not in keys:
        return "no key here has this name."
    is_of_model = family and not sections and key in named_family(family).config.model_fields
    suggestion = f"did you mean 'model.{key}'?" if is_of_model else suggest(key, keys)
    if sections and sections[0] in fields:
        suggestion = suggestion.replace("mean '", f"mean '{'.'.join([*sections, ''])}")
    others = [repr(n) for n, one in families().items() if sections == ["model"] and key in one.config.model_fields]
    return f"it is a key of {' and '.join(others)}, not of {family!r}; {suggestion}" if others else suggestion
