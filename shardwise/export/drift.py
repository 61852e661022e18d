"""The profile of a run's data, and `shardwise drift`, which compares new data with it.

A profile has histograms with fixed bins, column by column, small enough to travel with the model. Text has a row per
document (a text file is cut into passages), images and clicks one per sample. New data is counted in the same bins. A
column has drifted if its population stability index, a measure of size, and a test, a measure of chance, say so
(docs/how-to/hand-over.md). Counts of tokens are scaled to the number of documents, whose tokens are not independent."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from shardwise.console import Answer, fill_in
from shardwise.data.chat import read_conversations
from shardwise.data.input_files import BadRecords, DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import job_stream
from shardwise.data.text import TEXT_SOURCES, find_files, read_chunks, source_by_name
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from shardwise.errors import DataError, JobError
from shardwise.files import parse_json, write_text
from shardwise.job import Job, make_job

ASSETS = Path(__file__).parent / "assets"
THRESHOLD, SIGNIFICANCE = 0.1, 0.01
MIN_SHARE = 1e-4  # of an empty bin
DUPLICATE_GAIN = 0.02  # a smaller change of the share of repeated documents is none
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
    if data.source == "chat":
        files = DataRecord().take(find_files("jsonl", path or data.path))
        join = lambda messages, _: "\n".join(str(message["content"]) for message in messages)  # noqa: E731
        yield from (text for _, text in read_conversations(files, BadRecords(skip=True), join, job.loss.dpo_beta > 0))
        return
    for name in [path] if path else list(data.mix) or [data.path]:
        source = data.source
        if data.mix or (path and not Path(name).is_dir()):
            source, name = source_by_name(name)  # type: ignore[assignment]
        part = data.model_copy(update={"source": source, "path": name})
        bad_records = BadRecords(data.on_bad_record == "skip")
        for chunk in read_chunks(part, DataRecord().take(find_files(source, name)), bad_records):
            size = PASSAGE_BYTES if source in ("text", "stdlib") else len(chunk.text)
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
    is_text = job.model.sample_kind == "tokens" and job.data.source in (*TEXT_SOURCES, "chat", "mix")
    if is_text and tokenizer is not None:
        return profile_text(thin(text_passages(job, path)), tokenizer, like)
    return profile_samples(job, path, like)


@dataclass(frozen=True)
class ColumnDrift:
    """How a column of new data differs from the profile."""

    column: str
    psi: float
    p: float
    test: str  # ks or chi-square
    drifted: bool


def compare_columns(old: Columns, new: Columns, threshold: float = THRESHOLD) -> list[ColumnDrift]:
    return [_compare(name, old[name], new[name], threshold, len(new)) for name in old if name in new]


def _compare(name: str, old: dict[str, Any], new: dict[str, Any], threshold: float, columns: int) -> ColumnDrift:
    a, b = (np.asarray(column["counts"], np.float64) for column in (old, new))
    n, m = max(1, old["rows"]), max(1, new["rows"])
    share_a, share_b = a / max(1.0, a.sum()), b / max(1.0, b.sum())
    p, q = np.maximum(share_a, MIN_SHARE), np.maximum(share_b, MIN_SHARE)
    psi = float(((q - p) * np.log(q / p)).sum())
    used = int(((a + b) > 0).sum())
    chance = 3 * max(0, used - 1) * (1 / n + 1 / m)
    if "categories" in old or used <= 2:
        test, pooled = "chi-square", (share_a * n + share_b * m) / (n + m)
        filled = pooled > 0
        statistic = float(((share_a - share_b)[filled] ** 2 / pooled[filled]).sum()) * n * m / (n + m)
        chance_p = special.chdtrc(max(1, used - 1), statistic)
    else:
        test, gap = "ks", float(np.abs(np.cumsum(share_a - share_b)).max())
        chance_p = special.kolmogorov(gap * math.sqrt(n * m / (n + m)))
    # The share of repeated documents is near 0, where a PSI is small.
    is_large = abs(share_b[-1] - share_a[-1]) > DUPLICATE_GAIN if name == "duplicate" else psi > threshold + chance
    return ColumnDrift(name, psi, float(chance_p), test, bool(is_large and chance_p < SIGNIFICANCE / columns))


def read_profile(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
        for column in found["columns"].values():
            bins = len(column["edges"]) - 1 if "edges" in column else len(column["categories"]) + 1
            assert len(column["counts"]) == bins
        if found["columns"]:
            return found  # type: ignore[no-any-return]
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise DataError(f"{path} is no data profile; give the data-profile.json of an export.") from None
    raise DataError(f"{path} has no histograms, since the export could not read the data: {found.get('problem')}")


def drift(profile: Path, new: str, threshold: float = THRESHOLD, page: Path | None = None) -> list[ColumnDrift]:
    """Compares a file, a folder or another profile with a profile; writes the page, if one is asked for."""
    profile = profile / "data-profile.json" if profile.is_dir() else profile
    old = read_profile(profile)
    columns = read_profile(Path(new))["columns"] if Path(new).suffix == ".json" else _read_new(old, profile, new)
    found = compare_columns(old["columns"], columns, threshold)
    if not found:
        raise DataError(f"{new} has no column of {profile}; compare data of the same kind.")
    if page is not None:
        write_text(page, drift_page(found, old["columns"], columns, f"{new} against {profile}"))
    return found


def _read_new(old: dict[str, Any], profile: Path, new: str) -> Columns:
    job: Job = make_job({"model": old["model"], "data": old["data"]}, str(profile))
    saved = profile.parent / "tokenizer.json"
    has_tokens = job.model.sample_kind == "tokens"
    tokenizer = (load_tokenizer(str(saved)) if saved.exists() else ByteTokenizer()) if has_tokens else None
    return profile_data(job, tokenizer, new, old["columns"])


def drift_answer(found: list[ColumnDrift]) -> Answer:
    moved = [one.column for one in found if one.drifted]
    text = fill_in(ASSETS / "drift.txt", {"columns": found, "moved": moved})
    return Answer({"drifted": bool(moved), "columns": [asdict(one) for one in found]}, text, not moved)


def drift_page(found: list[ColumnDrift], old: Columns, new: Columns, title: str) -> str:
    """Returns one page without outside files: the histograms of both, side by side, drifted columns first."""
    template = (ASSETS / "drift.html").read_text(encoding="utf-8")
    ordered = sorted(found, key=lambda one: (not one.drifted, -one.psi))
    columns = [{**asdict(one), "old": old[one.column], "new": new[one.column]} for one in ordered]
    data = json.dumps({"title": title, "columns": columns}).replace("<", "\\u003c")
    return template.replace("{data}", data)
