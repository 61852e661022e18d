"""Tables of other frameworks' keys beside ours: flags of `tools/peers.toml`, answered by `shardwise/peer_words.toml`.

So the pages say what the program says to someone who writes such a key in a job or a layout.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.files import parse_toml
from shardwise.job import Job
from shardwise.models.gpt_family import DecoderConfig
from shardwise.peer_words import JOB_WORDS, LAYOUT_WORDS

FLAGS: dict[str, str] = parse_toml((Path(__file__).parent / "peers.toml").read_text(encoding="utf-8"))
ANSWERS = {word: text for table in (LAYOUT_WORDS, JOB_WORDS) for text, words in table.items() for word in words.split()}
LAYOUT_ANSWERS = {text.replace("{n}", "N") for text in LAYOUT_WORDS}
# What of an answer is code: a command, fields of a layout, a dotted key, with its value where one is given.
CODE = re.compile(
    r"shardwise train --resume RUN_FOLDER|shardwise train JOB.toml --node K/N --address HOST:PORT"
    r"|shardwise submit JOB.toml --slurm|shardwise trace|--\w+|[a-z_]+=[\w,.-]*\w(?: [a-z_]+=[\w,.-]*\w)*"
    r'|[a-z_]+\.[a-z_]+(?: = [\w"@]+)?|precision = "\w+"|micro_batch'
)
GROUPS = {
    "Layout": "layout", "Batch and length of a run": "batch steps tokens", "Optimizer": "optimizer",
    "Precision and compilation": "precision compile sdpa_backend", "Model": "model", "Data": "data",
}  # fmt: skip


def answer(flag: str) -> tuple[str, str]:
    """Returns a flag as its framework writes it, and our answer to it."""
    shown, _, word = flag.partition(":")
    section, _, key = shown.rpartition(".")
    if not word and key in getattr(getattr(Job.model_fields.get(section), "annotation", None), "model_fields", {}):
        return shown, shown  # the same key here
    for one in map(_normalize, [word] if word else reversed(shown.split("."))):
        if one in ANSWERS:
            return shown, ANSWERS[one].replace("{n}", "N")
        if one in Job.model_fields and not hasattr(Job.model_fields[one].annotation, "model_fields"):
            return shown, one
        if one in DecoderConfig.model_fields:
            return shown, f"model.{one}"
    raise KeyError(f"peers.toml: {flag} is not answered by shardwise/peer_words.toml")


def _normalize(word: str) -> str:
    return word.strip().lstrip("-").lower().replace("-", "_")


def group(answered: str) -> str:
    if answered in LAYOUT_ANSWERS:
        return "Layout"
    first = re.split(r"[. ]", answered)[0]
    return next((name for name, firsts in GROUPS.items() if first in firsts.split()), "Run and the rest")


def as_code(answered: str) -> str:
    """An answer with its keys as code."""
    if re.fullmatch(r"[\w.]+", answered):
        return f"`{answered}`"
    return CODE.sub(lambda found: f"`{found[0]}`", answered)


def peer_table(name: str) -> str:
    """One table per group of keys, a row per answer, in the order of peers.toml."""
    rows: dict[str, dict[str, list[str]]] = {title: {} for title in (*GROUPS, "Run and the rest")}
    for flag in FLAGS[name].split():
        shown, answered = answer(flag)
        rows[group(answered)].setdefault(answered, []).append(f"`{shown}`")
    parts = []
    for title, lines in rows.items():
        if lines:
            body = "\n".join(f"| {', '.join(theirs)} | {as_code(ours)} |" for ours, theirs in lines.items())
            parts.append(f"### {title}\n\n| theirs | here |\n| --- | --- |\n{body}")
    return "\n\n".join(parts)
