"""How often `shardwise drift` raises a false alarm, and which planted shifts it finds.

    python benchmarks/drift.py [--trials 100] [--documents 400]

One corpus is generated, documents of a language with letter statistics, word lengths and document lengths of its own;
the other is the source code of Python's standard library, in passages. A trial profiles documents, drawn at random, and
compares others of the same corpus (no drift), and then some with a planted shift: half of them in another language,
half as long, one in ten repeated, or encoded by a broken tokenizer. Exits 1 if 5% or more of the resamples alarm, or if
a planted shift is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np

from shardwise.data.tokenizer import ByteTokenizer, Tokenizer
from shardwise.export.drift import compare_columns, profile_text, text_passages
from shardwise.job import load_job

ALPHABETS = {"plain": "etaoinshrdlucmfwypvbgkjqxz", "accents": "eàiénrsoultdècmpévüöä"}


def documents(rng: np.random.Generator, count: int, language: str = "plain", length: float = 1.0) -> list[str]:
    """Generates documents: words by a Zipf law over a vocabulary of the language."""
    letters = np.array(list(ALPHABETS[language]))
    shares = np.cumsum(1.0 / np.arange(1, len(letters) + 1) ** 0.7)
    drawn = letters[np.searchsorted(shares / shares[-1], rng.random((1000, 10)), side="right")]
    words = ["".join(row[:size]) for row, size in zip(drawn, rng.integers(1, 10, size=1000), strict=True)]
    frequency = np.cumsum(1.0 / np.arange(1, len(words) + 1))
    sizes = np.maximum(3, rng.lognormal(np.log(40 * length), 0.6, size=count)).astype(int)
    texts = []
    for size in sizes:
        chosen = [words[n] for n in np.searchsorted(frequency / frequency[-1], rng.random(size), side="right")]
        sentences = [" ".join(chosen[at : at + 12]) for at in range(0, size, 12)]
        texts.append(". ".join([*sentences, f"{rng.integers(10**6)}."]))
    return texts


class LostMerges(ByteTokenizer):
    """A tokenizer that was broken on the way: it drops every third byte."""

    def encode(self, text: str) -> np.ndarray:
        ids = super().encode(text)
        return ids[np.arange(len(ids)) % 3 != 2]


def repeat(rng: np.random.Generator, texts: list[str]) -> list[str]:
    kept = len(texts) * 9 // 10
    return [*texts[:kept], *(texts[n] for n in rng.integers(kept, size=len(texts) - kept))]


def trial(seed: int, count: int, corpus: list[str] | None = None) -> dict[str, list[str]]:
    """Returns the columns that drifted, by what was done to the data."""
    rng, plain = np.random.default_rng(seed), ByteTokenizer()
    pool = documents(rng, 3 * count) if corpus is None else [corpus[n] for n in rng.permutation(len(corpus))]
    old = profile_text(pool[: 2 * count], plain)
    other = pool[2 * count : 3 * count]
    shifts: dict[str, Callable[[], tuple[list[str], Tokenizer]]] = {
        "resample": lambda: (other, plain),
        "language": lambda: (other[: count // 2] + documents(rng, count - count // 2, "accents"), plain),
        "length": lambda: ([text[: len(text) // 2] for text in other], plain),
        "duplicates": lambda: (repeat(rng, other), plain),
        "tokenizer": lambda: (other, LostMerges()),
    }
    found = {}
    for name, make in shifts.items():
        texts, used = make()
        columns = compare_columns(old, profile_text(texts, used, old))
        found[name] = [column.column for column in columns if column.drifted]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--documents", type=int, default=400)
    arguments = parser.parse_args()
    library = list(dict.fromkeys(text_passages(load_job(None, ["data.source=stdlib"]))))
    is_good = True
    for title, corpus in (("generated", None), ("stdlib", library)):
        results = [trial(seed, arguments.documents, corpus) for seed in range(arguments.trials)]
        rates = {name: sum(bool(result[name]) for result in results) / len(results) for name in results[0]}
        for name, rate in rates.items():
            columns = sorted({column for result in results for column in result[name]})
            print(f"{title:<10} {name:<12} alarms in {rate:6.1%} of {len(results)} trials  {', '.join(columns)}")
        is_good &= rates.pop("resample") < 0.05 and all(rate == 1.0 for rate in rates.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
