"""`shardwise drift`: compares new data with the profile of the data that a model was trained on.

For each column: the population stability index (PSI), a measure of size, and a test, a measure of chance: Kolmogorov-
Smirnov for numbers, chi-square for tokens, whose counts are scaled to the number of documents, because tokens of one
document are not independent. A column has drifted if its PSI exceeds the threshold by more than chance gives, and if
its p-value is below 1% divided by the number of columns.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from shardwise.data.tokenizer import ByteTokenizer, load_tokenizer
from shardwise.errors import DataError, JobError
from shardwise.export.data_profile import Columns, profile_data
from shardwise.files import parse_json, write_text
from shardwise.job import Job, make_job

THRESHOLD, SIGNIFICANCE = 0.1, 0.01
MIN_SHARE = 1e-4  # of an empty bin
DUPLICATE_GAIN = 0.02  # a smaller change of the share of repeated documents is none


@dataclass(frozen=True)
class ColumnDrift:
    """How a column of new data differs from the profile."""

    column: str
    psi: float
    p: float
    test: str  # ks or chi-square
    drifted: bool


def compare_columns(old: Columns, new: Columns, threshold: float = THRESHOLD) -> list[ColumnDrift]:
    """Compares each column of two profiles with the same bins."""
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
        return found  # type: ignore[no-any-return]
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise DataError(f"{path} is no data profile; give the data-profile.json of an export.") from None


def drift(profile: Path, new: str, threshold: float = THRESHOLD, page: Path | None = None) -> list[ColumnDrift]:
    """Compares a file, a folder or another profile with a profile; writes the page, if one is asked for."""
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


def drift_text(found: list[ColumnDrift]) -> str:
    rows = [f"{one.column:<18} PSI {one.psi:7.3f}  p {one.p:8.1e} ({one.test}){'  DRIFTED' * one.drifted}"
            for one in found]  # fmt: skip
    moved = [one.column for one in found if one.drifted]
    return "\n".join([*rows, f"drifted: {', '.join(moved)}." if moved else "no column has drifted."])


def drift_json(found: list[ColumnDrift]) -> str:
    return json.dumps({"drifted": any(one.drifted for one in found), "columns": [asdict(one) for one in found]})


def drift_page(found: list[ColumnDrift], old: Columns, new: Columns, title: str) -> str:
    """Returns one page without outside files: the histograms of both, side by side, drifted columns first."""
    template = (Path(__file__).parent / "assets" / "drift.html").read_text(encoding="utf-8")
    ordered = sorted(found, key=lambda one: (not one.drifted, -one.psi))
    columns = [{**asdict(one), "old": old[one.column], "new": new[one.column]} for one in ordered]
    data = json.dumps({"title": title, "columns": columns}).replace("<", "\\u003c")
    return template.replace("{data}", data)
