"""The profile of a run's data: histograms with fixed bins, column by column, small enough to travel with the model.

Text has a row per document (a text file is cut into passages): its length in bytes, tokens per byte, the shares of
classes of bytes, whether it repeats another one; and the counts of the most frequent tokens. Images and clicks have a
row per sample and a column per channel or feature. `shardwise drift` counts new data in the same bins.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.input_files import DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import job_stream
from shardwise.data.text import find_files, read_chunks
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError
from shardwise.job import Job

MAX_ROWS, PASSAGE_BYTES, TOP_TOKENS = 5000, 2000, 64
SHARES = np.linspace(0.0, 1.0, 41).tolist()
BINS = {"length": [0.0, *(float(2 ** (n / 2)) for n in range(44))], "duplicate": [0.0, 0.5, 1.0],
        "tokens_per_byte": np.linspace(0.0, 1.25, 51).tolist()}  # fmt: skip
BYTE_CLASSES = {"letters": b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "digits": b"0123456789",
                "spaces": b" \t\r\n", "beyond_ascii": bytes(range(128, 256))}  # fmt: skip
Columns = dict[str, dict[str, Any]]


def text_passages(job: Job, path: str = "") -> Iterator[str]:
    """Yields the documents of the job's data, or of a file; those of text files in passages."""
    data = job.data
    for name in [path] if path else list(data.mix) or [data.path]:
        source = data.source
        if path or data.mix:
            is_jsonl = name.endswith((".jsonl", ".ndjson")) or (source == "jsonl" and Path(name).is_dir())
            source = "stdlib" if name == "stdlib" else "jsonl" if is_jsonl else "text"
        part = data.model_copy(update={"source": source, "path": name})
        for chunk in read_chunks(part, DataRecord().take(find_files(source, name))):
            size = len(chunk.text) if source == "jsonl" else PASSAGE_BYTES
            yield from (chunk.text[at : at + size] for at in range(0, len(chunk.text), size))


def thin(rows: Iterable[Any], limit: int = MAX_ROWS) -> list[Any]:
    """Returns at most `limit` rows, evenly spread, of any number."""
    kept, stride = list[Any](), 1
    for number, row in enumerate(rows):
        if number % stride == 0:
            kept.append(row)
            if len(kept) > limit:
                kept, stride = kept[::2], stride * 2
    return kept


def profile_text(texts: list[str], tokenizer: Tokenizer, like: Columns | None = None) -> Columns:
    """Returns the histograms of documents, in the bins of another profile if there is one."""
    if not texts:
        raise DataError("there is no text to profile.")
    values: dict[str, list[float]] = {name: [] for name in (*BINS, *BYTE_CLASSES)}
    seen, tokens = set[int](), Counter[int]()
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        raw = text.encode()
        values["length"].append(len(raw))
        values["tokens_per_byte"].append(len(ids) / max(1, len(raw)))
        for name, members in BYTE_CLASSES.items():
            values[name].append(1 - len(raw.translate(None, members)) / max(1, len(raw)))
        values["duplicate"].append(float(hash(raw) in seen))
        seen.add(hash(raw))
        tokens.update(ids.tolist())
    columns = {name: _histogram(numbers, BINS.get(name, SHARES)) for name, numbers in values.items()}
    known = like["tokens"]["categories"] if like else [token for token, _ in tokens.most_common(TOP_TOKENS)]
    counts = [tokens[token] for token in known]
    columns["tokens"] = {"categories": known, "counts": [*counts, tokens.total() - sum(counts)], "rows": len(texts)}
    return columns


def profile_samples(job: Job, path: str = "", like: Columns | None = None) -> Columns:
    """Returns the histograms of images, clicks or tokens, by quantiles of the first data."""
    data = job.data.model_copy(update={"path": path, "validation_fraction": 0.0} if path else {})
    source = make_sources(job.model_copy(update={"data": data}))[0]
    count = min(len(source), MAX_ROWS)
    samples = job_stream(job, source, shuffle=False).read(np.arange(count) * len(source) // count)
    inputs = samples.tokens.double().reshape(count, samples.tokens.shape[1], -1)
    rows = {"label": samples.targets.double().reshape(count, -1)[:, 0].numpy()}
    if job.model.sample_kind == "tokens":
        rows = {"tokens": inputs.mean((1, 2)).numpy(), "spread": inputs.std((1, 2)).numpy()}
    elif job.model.sample_kind == "images":
        rows |= {f"channel{n}_{kind}": getattr(inputs[:, n], kind)(-1).numpy()
                 for n in range(inputs.shape[1]) for kind in ("mean", "std")}  # fmt: skip
    else:
        rows |= {f"feature{n}": inputs[:, n, 0].numpy() for n in range(inputs.shape[1])}
    return {name: _histogram(values, like[name]["edges"] if like else _quantiles(values))
            for name, values in rows.items() if like is None or name in like}  # fmt: skip


def _quantiles(values: Any) -> list[float]:
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, 21)))
    return [float(edge) for edge in edges] if len(edges) > 1 else [float(edges[0]) - 0.5, float(edges[0]) + 0.5]


def _histogram(values: Any, edges: list[float]) -> dict[str, Any]:
    """Counts values between edges; those beyond are in the first and the last bin."""
    inner = np.clip(np.asarray(values, np.float64), edges[0], math.nextafter(edges[-1], -math.inf))
    return {"edges": edges, "counts": np.histogram(inner, edges)[0].tolist(), "rows": len(values)}


def profile_data(job: Job, tokenizer: Tokenizer | None, path: str = "", like: Columns | None = None) -> Columns:
    """Returns the columns of the job's data, or of a file of the same kind, in the bins of `like` if given."""
    is_text = job.model.sample_kind == "tokens" and job.data.source in ("stdlib", "text", "jsonl", "mix")
    if is_text and tokenizer is not None:
        return profile_text(thin(text_passages(job, path)), tokenizer, like)
    return profile_samples(job, path, like)
