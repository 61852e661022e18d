"""Chat templates: how messages become text, and which part of the text the assistant says.

A template is Jinja, as Hugging Face's tokenizers carry it. It comes from elsewhere, so it runs in Jinja's sandbox. What
the assistant says is what stands in `{% generation %}` blocks; in a template without them, what a message of the
assistant adds to the text after the generation prompt. Some templates write a message differently once others follow
(they drop what the assistant thought). Each of its messages is then a sample of its own, the last in it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from shardwise.errors import DataError
from shardwise.files import user_path

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")  # of tokenizers without a template
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
        if operator == "**" or sizes[0] * sizes[1] > 10**6:
            raise SecurityError(f"{operator} makes too much")
        return left * right


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may write."""

    text: str
    name: str
    tokens: dict[str, str]

    @cached_property
    def _compiled(self) -> Template:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        # A fixed date: a run that is resumed on another day reads the same tokens.
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime(2024, 7, 26).strftime}
        try:
            return environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template {self.name}, line {error.lineno}: {error.message}.") from None

    def render(self, messages: Messages, tools: Any = None, prompts: bool = False) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and where the `{% generation %}` blocks stand in it. `prompts`: whether
        the text ends with what comes before a message of the assistant."""
        variables = {**self.tokens, "messages": messages, "tools": tools, "documents": None}
        template = self._compiled
        try:
            marked = template.render(**variables, add_generation_prompt=prompts)
            marked.encode()
        except Exception as error:  # a template can fail in any way
            kind = "" if type(error) is TemplateError else f"{type(error).__name__}: "
            reason = " ".join(f"{kind}{error}".split()).rstrip(".")[:300]
            raise DataError(f"the chat template {self.name} does not take this conversation: {reason}.") from None
        parts = re.split(f"[{_BEGIN}{_END}]", marked)  # by turns outside and inside of a block
        ends = list(accumulate(map(len, parts)))
        return "".join(parts), list(zip(ends[::2], ends[1::2]))

    def mark(self, messages: Messages, tools: Any, train_on: str) -> list[tuple[str, list[Span]]]:
        """Returns the samples of a conversation: texts, and which parts of each count towards the loss."""
        if train_on != "all" and all(message["role"] != "assistant" for message in messages):
            raise DataError('no message is the assistant\'s, so nothing counts; drop it, or set data.train_on = "all".')
        text, spans = self.render(messages, tools)
        chosen = slice(-1, None) if train_on == "last" else slice(None)
        if train_on == "all" or re.search(r"\{%[-+]?\s*generation\b", self.text):
            return [(text, [(0, len(text))] if train_on == "all" else spans[chosen])]
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"][chosen]
        untils = [self.render(messages[: number + 1], tools)[0] for number in turns]
        parts = [(self.render(messages[:number], tools, True)[0], until) for number, until in zip(turns, untils)]
        for number, (before, until) in zip(turns, parts):
            if not until.startswith(before):
                problem = f"the chat template {self.name} begins message {number + 1} without its generation prompt"
                remedy = "set data.chat_template to a copy of it with {% generation %} blocks"
                raise DataError(f"{problem}, so what counts cannot be told; {remedy}.")
        if all(text.startswith(until) for _, until in parts):
            return [(text, [(len(before), len(until)) for before, until in parts])]
        return [(until, [(len(before), len(until))]) for before, until in parts]

    def as_tokenizer_config(self) -> str:
        """Returns a `tokenizer_config.json` that holds the template."""
        return json.dumps({**self.tokens, "chat_template": self.text}, indent=2)


def load_template(name: str, tokenizer: str, has_chatml_tokens: bool) -> ChatTemplate:
    """Returns the template in the file `name`, else that of the tokenizer's folder, else ChatML if its tokens exist."""
    folder = user_path(tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    path = user_path(name) if name else folder / "chat_template.jinja"
    config_path, config = folder / "tokenizer_config.json", dict[str, Any]()
    try:
        if tokenizer != "bytes" and config_path.is_file():
            # Of a tokenizer without a limit, transformers writes 10**30 as its length, beyond 64 bits.
            config = json.loads(config_path.read_bytes(), parse_int=float)
        found = config.get("chat_template")
        if name or (tokenizer != "bytes" and path.is_file()):
            found = path.read_text(encoding="utf-8")
        elif isinstance(found, list):  # several of them
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the chat template {path if name else f'of {folder}'} cannot be read: {error}.") from None
    values = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    tokens = {key: value for key, value in values.items() if key.endswith("_token") and isinstance(value, str)}
    if isinstance(found, str):
        return ChatTemplate(found, str(path if path.is_file() else config_path), tokens)
    if not has_chatml_tokens:
        missing = f"has no chat template, nor the tokens {' and '.join(CHATML_TOKENS)} of the default one"
        raise DataError(f"data.tokenizer = {tokenizer!r} {missing}; set data.chat_template to a Jinja file.")
    return ChatTemplate(CHATML, "ChatML", tokens)
