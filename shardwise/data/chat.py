"""Conversations (docs/how-to/tune-on-chats.md): reads them, encodes them with a chat template, lays them out in rows.

Encoded conversations lie one after another in a token file, whose values are twice the token, plus one if the token
counts towards the loss. A sample is a row of `length` positions: the conversations in it, without their last tokens,
which predict nothing, then padding. Which of them share a row depends on their lengths alone, so sample order stays a
matter of the seed, whatever the layout. In a packed row, the first token t of each conversation, and of the padding, is
stored as -1 - t; document ids are made of that on the device (`Samples.with_packed_ids`). Of a pair of answers, both
conversations are in one row, and the last message counts (`shardwise.models.preference`)."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.console import pluralize
from shardwise.data.chat_template import MARKS, ChatTemplate, Messages
from shardwise.data.input_files import BadRecords, DataFile
from shardwise.data.sample_stream import CountedSource, Samples
from shardwise.data.text import parse_object, read_lines
from shardwise.data.token_file import TokenFile, open_token_file, write_token_arrays
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError, shorten
from shardwise.files import os_errors_as
from shardwise.job import DataConfig
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.preference import mark_rejected

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}


def parse_pair(record: dict[str, Any]) -> list[tuple[Messages, Any]]:
    """Returns the chosen and the rejected conversation of a row."""
    if "chosen" not in record or "rejected" not in record:
        raise DataError("loss.dpo_beta needs rows with a chosen and a rejected answer, and this one has not both.")
    rest = {key: value for key, value in record.items() if key not in ("prompt", "chosen", "rejected")}
    conversations = []
    for answer in (record["chosen"], record["rejected"]):
        first = answer[0] if isinstance(answer, list) and answer and isinstance(answer[0], dict) else {}
        is_whole = first.get("role", first.get("from", "assistant")) not in ("assistant", "gpt")
        if not is_whole and "prompt" not in record:
            raise DataError("the row has a chosen and a rejected answer, but no prompt; fix or drop it.")
        row = {"messages": answer} if is_whole else {"prompt": record["prompt"], "completion": answer}
        conversations.append(parse_conversation({**rest, **row}))
        if conversations[-1][0][-1]["role"] != "assistant":
            raise DataError("an answer must end with a message of the assistant; fix or drop it.")
    return conversations


def parse_conversation(record: dict[str, Any]) -> tuple[Messages, Any]:
    """Returns the messages of a row, and the tools that it declares."""
    given = record.get("messages", record.get("conversations"))
    if given is None and "prompt" in record and "completion" in record:
        sides = (("user", record["prompt"]), ("assistant", record["completion"]))
        as_messages = (side if isinstance(side, list) else [{"role": role, "content": side}] for role, side in sides)
        given = [message for messages in as_messages for message in messages]
    if given is None:
        keys = shorten(", ".join(map(str, record)))
        if "chosen" in record and "rejected" in record:
            raise DataError("the row has a chosen and a rejected answer; set loss.dpo_beta to learn from both.")
        raise DataError(f"the row has the keys {keys}; it needs messages, conversations, or prompt and completion.")
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise DataError("its messages must be a list of objects, each with a role and a content; fix or drop it.")
    if isinstance(record.get("system"), str) and record["system"]:
        given = [{"role": "system", "content": record["system"]}, *given]
    return [_parse_message(message, number) for number, message in enumerate(given, start=1)], record.get("tools")


def _parse_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = SHAREGPT_ROLES.get(str(role), role)
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if role not in ROLES:
        raise DataError(f"message {number} has the role {shorten(role)}; roles are {', '.join(ROLES)}.")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"message {number} has the content {shorten(content)}, which is not a text; fix or drop it.")
    if content and any(mark in content for mark in MARKS):
        raise DataError(f"message {number} has a character that Unicode reserves (U+FDD0 or U+FDD1); remove it.")
    return {**message, "role": role, "content": content}


def read_conversations(files: Sequence[DataFile], bad_records: BadRecords, use: Callable[[Messages, Any], Any],
                       pairs: bool = False) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """Yields where each conversation stands, and what `use` makes of messages and tools; `pairs`: two of each row."""
    for file in files:
        with os_errors_as(DataError, f"{file.path} cannot be read"):
            for where, line in read_lines(file):
                try:
                    row = parse_object(line)
                    used = [use(*parsed) for parsed in (parse_pair(row) if pairs else [parse_conversation(row)])]
                    yield from ((where, one) for one in used)
                except DataError as error:
                    bad_records.report(DataError(f"{where}: {error}"))


def encode_chats(data: DataConfig, files: Sequence[DataFile], tokenizer: Tokenizer, template: ChatTemplate,
                 folder: Path, bad_records: BadRecords, pairs: bool) -> None:  # fmt: skip
    """Writes the conversations of some files into `folder`: their tokens, and their lengths."""
    lengths, together = list[int](), 1 + pairs

    def arrays() -> Iterator[np.ndarray]:
        mark = partial(template.mark, train_on="last" if pairs else data.train_on)
        found = read_conversations(files, bad_records, mark, pairs)
        samples = ((where, text, spans) for where, marked in found for text, spans in marked)
        while batch := list(islice(samples, 1000)):
            values = []
            for (_, _, spans), (ids, first, last) in zip(batch, tokenizer.encode_chat([text for _, text, _ in batch])):
                counts = np.zeros(len(ids), bool)
                for start, stop in spans:
                    counts |= (first < stop) & (last > start)
                values.append(2 * ids.astype(np.int64) + counts)
            for place in range(0, len(values), together):
                row = values[place : place + together]
                if all((conversation[1:] % 2).any() for conversation in row):
                    lengths.extend(map(len, row))
                    yield from row
                else:
                    where = batch[place][0]
                    bad_records.report(DataError(f"{where}: no token of the conversation counts; fix or drop it."))
        if not lengths:
            raise DataError(f"data.path = {data.path!r} has no conversations; each line of a file must be one.")

    write_token_arrays(folder / "tokens.bin", arrays(), 2 * tokenizer.vocab)
    write_token_arrays(folder / "lengths.bin", [np.array(lengths)], max(lengths) + 1)


def open_chats(folder: Path, length: int, truncate: str, pairs: bool) -> tuple[TokenFile, np.ndarray, str]:
    """Returns encoded conversations: their tokens; the first and last (exclusive) of each (conversations, 2), cut to
    `length` + 1, of a pair to half of it; and a summary."""
    length //= 1 + pairs
    tokens, lengths = open_token_file(folder / "tokens.bin"), open_token_file(folder / "lengths.bin")
    sizes = lengths.read(0, lengths.count)
    stops = np.cumsum(sizes)
    starts, is_long = stops - sizes, sizes > length + 1
    if truncate == "left":
        starts = np.maximum(starts, stops - length - 1)
    else:
        stops = np.minimum(stops, starts + length + 1)
    is_kept = ~is_long if truncate == "drop" else np.ones(len(sizes), bool)
    for number in np.flatnonzero(is_long & is_kept).tolist():  # what is left of it may be questions only
        is_kept[number] = (tokens.read(starts[number] + 1, stops[number]) % 2).any()
    if pairs:
        is_kept = is_kept.reshape(-1, 2).all(1).repeat(2)
    cut, dropped = int((is_long & is_kept).sum()), int((~is_kept).sum())
    why = "longer than" if truncate == "drop" else "with nothing that counts within"
    changes = f", {cut} cut at the {truncate}" if cut else ""
    changes += f", {dropped} dropped ({why} {length + 1} tokens)" if dropped else ""
    summary = f"{pluralize(len(sizes), 'conversation')} of {int(sizes.sum()):,} tokens{changes}"
    if not is_kept.any():
        raise DataError(f"no conversation is left of {summary}; use a longer model.sequence.")
    return tokens, np.stack((starts, stops), 1)[is_kept], summary


class ChatRows(CountedSource):
    """Rows of conversations, one or several in each; builds its batches itself."""

    summary = tokenizer_config = ""  # `tokenizer_config.json`: the chat template, which the run keeps

    def __init__(self, tokens: TokenFile, extents: np.ndarray, length: int, pad_id: int, packed: bool,
                 dpo_beta: float = 0.0):  # fmt: skip
        """`dpo_beta`: of pairs of answers, which share a row; 0: there are none."""
        self.tokens, self.extents, self.packed, self.dpo_beta = tokens, extents, packed or dpo_beta > 0, dpo_beta
        self.length, self.vocab, self.pad_id = length, tokens.vocab // 2, pad_id
        sizes = (extents[:, 1] - extents[:, 0] - 1).tolist()
        together = 1 + (dpo_beta > 0)
        separate = [[*range(number, number + together)] for number in range(0, len(sizes), together)]
        rows = pack(sizes, length) if packed else separate
        self.order = np.array([number for row in rows for number in row], np.int64)
        self.ends = np.cumsum([0, *map(len, rows)])
        self.count, self.filled = len(rows), sum(sizes) / max(1, len(rows) * length)
        self.reference = np.zeros(self.count)  # of pairs: how much the first model prefers the chosen answer

    def read_row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the tokens of a row, their targets, and which of the tokens are first in a conversation."""
        tokens = np.full(self.length, self.pad_id, np.int64)
        targets, is_first, place = np.full_like(tokens, IGNORE_INDEX), np.zeros(self.length, bool), 0
        for start, stop in self.extents[self.order[self.ends[index] : self.ends[index + 1]]].tolist():
            values = self.tokens.read(start, stop)
            is_first[place], end = True, place + len(values) - 1
            tokens[place:end] = values[:-1] >> 1
            targets[place:end] = np.where(values[1:] & 1, values[1:] >> 1, IGNORE_INDEX)
            if self.dpo_beta and place:
                targets[place:end] = mark_rejected(targets[place:end])
            place = end
        is_first[place : place + 1] = True  # of the padding
        return tokens, targets, is_first

    def read_sample(self, index: int) -> np.ndarray:
        return self.read_row(index)[0]

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        tokens, targets, is_first = map(np.stack, zip(*map(self.read_row, indices.tolist()), strict=True))
        parts = [np.where(is_first & self.packed, ~tokens, tokens), targets, positions.astype(np.int64)]
        if self.dpo_beta:
            parts.append(np.stack((self.reference[indices], np.full(len(indices), self.dpo_beta)), 1))
        return Samples.from_tensors(torch.from_numpy(part) for part in parts)


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Returns which items share a row: each goes, longest first, where it leaves the least space (best fit)."""
    rows: list[list[int]] = []
    spaces, rows_by_space = list[int](), dict[int, list[int]]()  # what is left in rows: the sizes, sorted; the rows
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place, space, row = bisect_left(spaces, sizes[item]), length, len(rows)
        if place < len(spaces):
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[place]
        else:
            rows.append([])
        rows[row].append(item)
        same_space = rows_by_space.setdefault(space - sizes[item], [])
        if not same_space:
            insort(spaces, space - sizes[item])
        same_space.append(row)
    return sorted(sorted(row) for row in rows)
