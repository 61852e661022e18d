"""Chat templates: how messages become text, and which part of the text the assistant says.

A template is Jinja, as Hugging Face's tokenizers carry it (`chat_template.jinja`, or `chat_template` in
`tokenizer_config.json`). It comes with data from elsewhere, so it runs in Jinja's sandbox. What the assistant says is
what stands in `{% generation %}` blocks. In a template without them, it is what a message of the assistant adds to the
text after the generation prompt. Some templates write a message differently once others follow (they drop what the
assistant thought); each of the assistant's messages is then a sample of its own, in which nothing follows it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from shardwise.errors import DataError
from shardwise.files import parse_json

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a tokenizer without one (`data.chat_template` = "chatml")."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_REPEATS = 10**6  # length of what a template makes with `*`
MARKS = _BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode's noncharacters, which no text has


class _Generation(Extension):
    """`{% generation %}`: puts marks around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right)]
        if operator == "**" or (any(hasattr(x, "__len__") for x in (left, right)) and sizes[0] * sizes[1] > MAX_REPEATS):
            raise SecurityError(f"{operator} makes too much")
        return left * right


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own would escape HTML


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may write."""

    text: str
    name: str
    tokens: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> Template:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        # A fixed date: a run that is resumed on another day reads the same tokens.
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime(2024, 7, 26).strftime}
        try:
            return environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template {self.name}, line {error.lineno}, is not valid: {error.message}.") from None

    def render(self, messages: Messages, tools: Any = None, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and where the `{% generation %}` blocks stand in it."""
        variables = {**self.tokens, "messages": messages, "tools": tools, "documents": None}
        try:
            marked = self._compiled.render(**variables, add_generation_prompt=add_generation_prompt)
            marked.encode()
        except DataError:
            raise
        except UnicodeEncodeError as error:
            raise DataError(f"it is not Unicode text ({error.reason}); fix or drop it.") from None
        except Exception as error:  # a template can fail in any way
            reason = " ".join(f"{error}".split()).rstrip(".")[:300]
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            raise DataError(f"the chat template {self.name} does not take this conversation: {kind}{reason}.") from None
        text, spans, start = "", list[Span](), 0
        for part in re.split(f"([{_BEGIN}{_END}])", marked):
            if part == _BEGIN:
                start = len(text)
            elif part == _END:
                spans.append((start, len(text)))
            else:
                text += part
        return text, spans

    def mark(self, messages: Messages, tools: Any, train_on: str) -> list[tuple[str, list[Span]]]:
        """Returns the samples of a conversation: texts, and which parts of each count towards the loss."""
        text, spans = self.render(messages, tools)
        if train_on == "all":
            return [(text, [(0, len(text))])]
        chosen = slice(-1, None) if train_on == "last" else slice(None)
        if re.search(r"\{%[-+]?\s*generation\b", self.text):
            return [(text, spans[chosen])]
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"][chosen]
        parts = [self._turn(messages, number, tools) for number in turns]
        if all(text.startswith(until) for _, until in parts):
            return [(text, [(len(before), len(until)) for before, until in parts])]
        return [(until, [(len(before), len(until))]) for before, until in parts]

    def _turn(self, messages: Messages, number: int, tools: Any) -> tuple[str, str]:
        """Returns the text before one of the assistant's messages, and that with the message."""
        before, _ = self.render(messages[:number], tools, add_generation_prompt=True)
        until, _ = self.render(messages[: number + 1], tools)
        if not until.startswith(before):
            raise DataError(
                f"the chat template {self.name} does not begin message {number + 1}, the assistant's, with its generation "
                "prompt, so what the assistant says cannot be told; add {% generation %} blocks to a copy of it and "
                "name that as data.chat_template."
            )
        return before, until

    def save(self) -> str:
        """Returns a `tokenizer_config.json` that holds the template."""
        return json.dumps({**self.tokens, "chat_template": self.text}, indent=2)


def load_template(name: str, tokenizer: str, has_tokens: bool) -> ChatTemplate:
    """Returns the template that `data.chat_template` names, or else that of the tokenizer's folder, or else ChatML if
    the tokenizer has its tokens."""
    folder = Path(tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    config = _read_config(folder / "tokenizer_config.json") if tokenizer != "bytes" else {}
    values = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    tokens = {key: value for key, value in values.items() if key.endswith("_token") and isinstance(value, str)}
    found = config.get("chat_template")
    if isinstance(found, list):  # several of them, by name
        by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = by_name.get("default", next(iter(by_name.values()), None))
    path = Path(name).expanduser() if name not in ("", "chatml") else folder / "chat_template.jinja"
    if name not in ("", "chatml") or (not name and tokenizer != "bytes" and path.is_file()):
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the chat template {path} cannot be read: {error}.") from None
    if isinstance(found, str) and not name:
        return ChatTemplate(found, f"of {folder / 'tokenizer_config.json'}", tokens)
    if not has_tokens and not name:
        raise DataError(
            f"data.tokenizer = {tokenizer!r} has no chat template and not the tokens {' and '.join(CHATML_TOKENS)} of "
            "the default one; set data.chat_template to a Jinja file (or to chatml)."
        )
    return ChatTemplate(CHATML, "chatml", tokens)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    return config if isinstance(config, dict) else {}
