"""The road from files to batches: nothing is lost, nothing comes twice, and what is broken is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import struct
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from data_marks import Marks
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli import app
from shardwise.data.criteo import CriteoClicks, index_criteo_file
from shardwise.data.input_files import BadRecords, DataFile
from shardwise.data.loader import Loader, _RankReader, _start_worker
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import Mixture, Samples, SampleStream, Source, SyntheticTokens, rank_positions
from shardwise.data.text import encode_source, find_files, read_chunks
from shardwise.data.token_file import (
    MAGIC,
    TokenFile,
    TokenWindows,
    open_raw_token_file,
    open_token_file,
    write_token_arrays,
)
from shardwise.data.tokenizer import EOS_TOKEN, ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, train_bpe
from shardwise.errors import DataError, JobError, UserError
from shardwise.job import DataConfig, Job, load_job, make_job
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.random import Permutation

TEXTS = ["first document\nwith two lines\n", "der zweite: äöü, 世界, 👍\n", "third " * 40]


def job_of(source: str, path: Path | str = "", sequence: int = 8, vocab: int = 256, **data: object) -> Job:
    settings = {"source": source, "path": str(path), **data}
    return make_job({"model": {"sequence": sequence, "vocab": vocab}, "data": settings})


def all_of(source: Source) -> list[list[int]]:
    return [source[index].tolist() for index in range(len(source))]


def folder_of(path: Path, texts: list[str]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return path


def same(a: Samples, b: Samples) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "ids"))


# Order and shares


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_permutation_is_one(n: int, seed: int, epoch: int) -> None:
    order = Permutation(n, "order", seed, epoch)
    assert np.array_equal(np.sort(order(np.arange(n))), np.arange(n))
    assert order(np.arange(n))[n // 2] == order(np.array([n // 2]))[0]  # a place does not depend on its neighbours


def test_permutation_of_a_large_range_stays_inside() -> None:
    n = 10**12 + 39
    found = Permutation(n, "order", 0, 0)(np.arange(10_000) * (n // 10_000))
    assert len(np.unique(found)) == 10_000 and found.min() >= 0 and found.max() < n


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(1, 12), own=st.integers(1, 9), step=st.integers(0, 10**9))
def test_shares_cover_the_step_whatever_the_ranks(ranks: int, own: int, step: int) -> None:
    samples = ranks * own
    places = np.concatenate([rank_positions(step, samples, ranks, rank) for rank in range(ranks)])
    assert places.tolist() == list(range(step * samples, (step + 1) * samples))


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    stream = SampleStream(SyntheticTokens(37, 4, 11, 0), seed=5)
    epochs = stream.indices(np.arange(3 * 37)).reshape(3, 37)
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert stream.indices(np.arange(30, 45)).tolist() == epochs.reshape(-1)[30:45].tolist()


def test_synthetic_equals_its_definition() -> None:
    source = SyntheticTokens(5, 300, 17, seed=3)
    follow = Permutation(17, "synthetic", 3)(np.arange(17))
    for index in range(5):
        draw = np.random.default_rng((3, index))
        noise, expected = draw.random(301) < 0.1, draw.integers(0, 17, 301)
        for i in range(1, 301):
            expected[i] = expected[i] if noise[i] else follow[expected[i - 1]]
        assert source[index].tolist() == expected.tolist()


# Token files


@pytest.mark.parametrize(("vocab", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_token_file_round_trip(tmp_path: Path, vocab: int, width: int) -> None:
    ids = np.arange(1000) * 7919 % vocab
    path = tmp_path / "deep" / "tokens.bin"
    write_token_arrays(path, iter(np.array_split(ids, 7)), vocab)
    file = open_token_file(path)
    assert (file.count, file.vocab) == (1000, vocab)
    assert path.stat().st_size == 32 + 1000 * width
    assert np.array_equal(file.read(0, 1000), ids)
    assert os.listdir(path.parent) == ["tokens.bin"]


def test_empty_token_file(tmp_path: Path) -> None:
    write_token_arrays(tmp_path / "none.bin", iter([]), 256)
    assert len(open_token_file(tmp_path / "none.bin").read(0, 5)) == 0


def test_broken_token_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_token_arrays(path, [np.arange(100)], 1000)
    whole = path.read_bytes()
    for broken, words in [
        (whole[:-1], "truncated"),
        (whole + b"x", "truncated"),
        (whole[:20], "not a token file"),
        (b"", "not a token file"),
        (b"NOTMAGIC" + whole[8:], "shardwise data"),
        (MAGIC + struct.pack("<IIQQ", 9, 2, 1000, 100) + whole[32:], "version 9"),
    ]:
        path.write_bytes(broken)
        with pytest.raises(DataError, match=words):
            open_token_file(path)
    with pytest.raises(DataError, match="cannot be read"):
        open_token_file(tmp_path / "absent.bin")


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_token_arrays(path, [np.arange(10)], 256)
    with pytest.raises(DataError, match="256"):
        write_token_arrays(path, [np.arange(10), np.array([256])], 256)
    assert open_token_file(path).count == 10
    assert os.listdir(tmp_path) == ["tokens.bin"]


def test_raw_files_only_when_told(tmp_path: Path) -> None:
    path = tmp_path / "raw.bin"
    np.arange(100, dtype="<u2").tofile(path)
    with pytest.raises(DataError, match=":uint16"):
        make_sources(job_of("tokens", path), tmp_path)
    training, validation, tokenizer = make_sources(
        job_of("tokens", f"{path}:uint16", validation_fraction=0.25), tmp_path
    )
    assert all_of(training)[0] == list(range(9)) and len(training) == 9 and len(validation) == 3
    assert tokenizer is None  # nothing tells what the ids mean
    with pytest.raises(DataError, match=r"id 99 at token 99.*model.vocab = 100"):
        all_of(
            make_sources(job_of("tokens", f"{path}:uint16", vocab=99, sequence=9, validation_fraction=0), tmp_path)[0]
        )
    with pytest.raises(DataError, match="multiple of 4"):
        open_raw_of(path, b"\0" * 6)
    write_token_arrays(path, [np.arange(100)], 256)
    with pytest.raises(DataError, match="leave ':uint16' out"):
        make_sources(job_of("tokens", f"{path}:uint16"), tmp_path)


def open_raw_of(path: Path, content: bytes) -> TokenFile:
    path.write_bytes(content)
    return open_raw_token_file(path, "uint32", 256)


def test_several_token_files_are_joined_in_order(tmp_path: Path) -> None:
    for name, ids in [("b", np.arange(100, 125)), ("a", np.arange(50)), ("c", np.arange(3))]:
        write_token_arrays(tmp_path / f"{name}.bin", [ids], 256)
    for path in (tmp_path, tmp_path / "*.bin"):
        training, _, _ = make_sources(job_of("tokens", path, sequence=10, validation_fraction=0), tmp_path)
        assert [row[0] for row in all_of(training)] == [0, 10, 20, 30, 100, 110]


# Documents


def test_windows_are_the_corpus(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", TEXTS)
    expected = b"".join(text.encode() + b"\0" for text in TEXTS)
    training, validation, tokenizer = make_sources(job_of("text", folder, validation_fraction=0.1), tmp_path / "cache")
    rows = all_of(training) + all_of(validation)
    assert len(rows) == (len(expected) - 1) // 8
    assert rows == [list(expected[i * 8 : i * 8 + 9]) for i in range(len(rows))]
    assert tokenizer is not None and tokenizer.decode(rows[0]) == TEXTS[0][:9]


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 400), sequence=st.integers(1, 40), share=st.floats(0, 0.99))
def test_the_split_loses_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, sequence: int, share: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "split.bin"
    write_token_arrays(path, [np.arange(tokens)], 1000)
    if tokens <= sequence:
        with pytest.raises(DataError, match=f"{tokens} tokens.*{sequence + 1}"):
            make_sources(job_of("tokens", path, sequence, 1000, validation_fraction=share), path.parent)
        return
    training, validation, _ = make_sources(
        job_of("tokens", path, sequence, 1000, validation_fraction=share), path.parent
    )
    count = (tokens - 1) // sequence
    assert [row[0] for row in all_of(training) + all_of(validation)] == [i * sequence for i in range(count)]
    assert len(training) >= 1
    assert (len(validation) > 0) == (share > 0 and count > 1)


def test_standard_library_is_a_corpus() -> None:
    files = find_files("stdlib", "")
    assert files == sorted(find_files("stdlib", ""), key=files.index) and len(files) > 300
    parts = {part for file in files for part in file.parts}
    assert not parts & {"site-packages", "test", "tests", "idle_test"}
    pieces = list(islice(read_chunks(DataConfig(), [DataFile.of(file) for file in files]), 3))
    assert all(piece.ends_document and len(piece.text) > 100 for piece in pieces)


def test_long_documents_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.data.text.CHUNK_CHARS", 10)
    path = tmp_path / "long.txt"
    text = "a line of text\r\n" * 5 + "x" * 50
    path.write_text(text, newline="")
    pieces = list(read_chunks(DataConfig(source="text", path=str(path)), [DataFile.of(path)]))
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 3
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_binary_and_hidden_files_are_passed_over_but_not_when_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", TEXTS)
    for name, content in [
        ("image.png", b"\x89PNG\0\0"),
        ("latin.txt", b"caf\xe9"),
        (".hidden", b"hidden"),
        ("no", b""),
    ]:
        (folder / name).write_bytes(content)
    summary = encode_source(DataConfig(source="text", path=str(folder)), tmp_path / "out.bin")
    size = sum(len(text.encode()) for text in TEXTS)
    assert f"{size + 3:,} tokens (vocabulary 256) from 3 documents, {size:,} bytes of text" in summary
    with pytest.raises(DataError, match="latin.txt is not text"):
        encode_source(DataConfig(source="text", path=str(folder / "latin.txt")), tmp_path / "out.bin")
    with pytest.raises(DataError, match="has no text"):
        encode_source(DataConfig(source="text", path=str(folder / "*.png")), tmp_path / "other.bin")
    assert not (tmp_path / "other.bin").exists()


@pytest.mark.parametrize("name", ["absent.txt", "empty", "*.none", ""])
def test_missing_paths_are_errors(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / name) if name else ""
    with pytest.raises(DataError, match="give a file, a folder or a glob|needs data.path"):
        make_sources(job_of("text", path), tmp_path)


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS) + "\n\n", encoding="utf-8")
    summary = encode_source(DataConfig(source="jsonl", path=str(tmp_path), text_field="body"), tmp_path / "out.bin")
    assert "from 3 documents" in summary
    expected = b"".join(text.encode() + b"\0" for text in TEXTS)
    file = open_token_file(tmp_path / "out.bin")
    assert bytes(file.read(0, file.count).tolist()) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        ('{"txt": "a"}', "did you mean 'txt'"),
        ('{"text": 5}', "is 5, not a string"),
        ('{"text": "\\ud800"}', "not Unicode"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=f"bad.jsonl, line 2.*{words}"):
        encode_source(DataConfig(source="jsonl", path=str(path)), tmp_path / "out.bin")
    assert os.listdir(tmp_path) == ["bad.jsonl"]


# Tokenizers


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_bytes_round_trip(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    text = text.replace("\0", "")
    assert ByteTokenizer().decode(ids) == text
    assert ByteTokenizer().count_bytes([*ids.tolist(), 0, -100, 300]) == len(text.encode())


@pytest.fixture(scope="module")
def pairs() -> HuggingFaceTokenizer:
    return train_bpe(TEXTS * 3, 300)


def test_bpe_is_deterministic_and_round_trips(pairs: HuggingFaceTokenizer, tmp_path: Path) -> None:
    pairs.save(tmp_path / "tokenizer.json")
    train_bpe(iter(TEXTS * 3), 300).save(tmp_path / "again.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.vocab, loaded.eos_id) == (pairs.vocab, 0)
    for text in [*TEXTS, "", "\0 \r\n\t", f"spelled {EOS_TOKEN}", "nie gesehen: ß†"]:
        ids = loaded.encode(text)
        assert 0 not in ids
        assert loaded.decode([0, *ids.tolist(), 0, -100, 10**6]) == text
        assert loaded.count_bytes([0, *ids.tolist(), -100, 10**6]) == len(text.encode())


def test_bytes_of_adds_up_where_characters_are_cut(pairs: HuggingFaceTokenizer) -> None:
    ids = pairs.encode("世界👍" * 5)
    assert sum(pairs.count_bytes([one]) for one in ids) == pairs.count_bytes(ids) == len(("世界👍" * 5).encode())


def test_bpe_source(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", TEXTS)
    job = job_of("text", folder, vocab=300, tokenizer="bpe:300", validation_fraction=0)
    training, _, tokenizer = make_sources(job, tmp_path / "cache")
    assert tokenizer is not None and tokenizer.vocab <= 300
    text = tokenizer.decode([one for row in all_of(training) for one in row[:-1]])
    assert len(text) > 100 and "".join(TEXTS).startswith(text)
    assert len(list((tmp_path / "cache").glob("*/tokenizer.json"))) == 1
    with pytest.raises(DataError, match=r"has 4096 ids, but model.vocab is 256; set model.vocab = 4096"):
        make_sources(job_of("text", folder, tokenizer="bpe:4096"), tmp_path / "cache")


def test_encode_saves_what_reading_needs(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "texts", TEXTS)
    data = DataConfig(source="text", path=str(folder), tokenizer="bpe:280")
    summary = encode_source(data, tmp_path / "out.bin")
    assert f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()):,} bytes of text" in summary
    job = job_of("tokens", tmp_path / "out.bin", vocab=280, tokenizer=str(tmp_path / "out.tokenizer.json"))
    training, _, tokenizer = make_sources(job, tmp_path)
    assert tokenizer is not None and tokenizer.decode(training[0]) in TEXTS[0]
    assert make_sources(job_of("tokens", tmp_path / "out.bin", vocab=280), tmp_path)[2] is None
    with pytest.raises(DataError, match="model.vocab = 280"):
        make_sources(job_of("tokens", tmp_path / "out.bin", vocab=256), tmp_path)
    for source, words in [("tokens", "no text to encode"), ("synthetic", "no text to encode")]:
        with pytest.raises(DataError, match=words):
            encode_source(DataConfig(source=source, path=str(folder)), tmp_path / "out.bin")  # type: ignore[arg-type]


def test_what_was_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one two three")
    settings = ["data.source=text", f"data.path={tmp_path / 'one.txt'}"]
    told = encode_source(load_job(None, settings).data, tmp_path / "out.bin")
    assert told == f"{tmp_path}/out.bin: 14 tokens (vocabulary 256) from 1 document, 13 bytes of text"
    told = encode_source(load_job(None, [*settings, "data.tokenizer=bpe:280"]).data, tmp_path / "out.bin")
    assert f"{tmp_path}/out.tokenizer.json: tokenizer" in told


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("bpe:many", "at least 257"),
        ("bpe:100", "at least 257"),
        ("bpe4096", "bpe:SIZE"),
        ("broken.json", "cannot be read"),
    ],
)
def test_wrong_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{}")
    folder_of(tmp_path / "texts", TEXTS)
    with pytest.raises(DataError, match=words):
        make_sources(job_of("text", "texts", vocab=5000, tokenizer=tokenizer), tmp_path / "cache")


def test_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install shardwise\[bpe\]"):
        train_bpe(TEXTS, 300)


# The cache


def test_cache_is_used_until_something_changes(tmp_path: Path) -> None:
    folder, cache = folder_of(tmp_path / "texts", TEXTS), tmp_path / "cache"
    first = all_of(make_sources(job_of("text", folder), cache)[0])
    (tokens,) = cache.glob("*/tokens.bin")
    made = tokens.stat().st_mtime_ns
    assert all_of(make_sources(job_of("text", folder), cache)[0]) == first
    assert tokens.stat().st_mtime_ns == made
    tokens.write_bytes(tokens.read_bytes()[:50])  # torn by a full disk, say
    assert all_of(make_sources(job_of("text", folder), cache)[0]) == first
    (folder / "0.txt").write_text("changed")
    assert all_of(make_sources(job_of("text", folder), cache)[0]) != first
    assert len(list(cache.glob("*/tokens.bin"))) == 2


def test_many_may_build_the_cache_at_once(tmp_path: Path) -> None:
    job = job_of("text", folder_of(tmp_path / "texts", TEXTS), vocab=300, tokenizer="bpe:300")
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: all_of(make_sources(job, tmp_path / "cache")[0]), range(4)))
    assert all(other == rows[0] for other in rows)
    assert len(list((tmp_path / "cache").glob("*/*.bin"))) == 1 and not list(tmp_path.glob("cache/*/.*"))


def test_synthetic_sources_share_the_rule_and_no_walk() -> None:
    training, validation, tokenizer = make_sources(
        job_of("synthetic", sequence=64, vocab=32, samples=100, validation_fraction=0.1), Path()
    )
    assert (len(training), len(validation), tokenizer) == (100, 10, None)
    assert all_of(training) == all_of(SyntheticTokens(100, 64, 32, 0))
    assert not {tuple(row) for row in all_of(training)} & {tuple(row) for row in all_of(validation)}
    steps = {pair for row in all_of(training) for pair in zip(row, row[1:])}
    known = [pair in steps for row in all_of(validation) for pair in zip(row, row[1:])]
    assert np.mean(known) > 0.8  # what was learned in training holds in validation


# The loader


def threads_and_processes() -> list[object]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]
    return [*threads, *multiprocessing.active_children()]


@pytest.mark.parametrize("workers", [0, 3])
def test_loader_gives_the_stream_from_any_step(workers: int) -> None:
    stream = SampleStream(Marks(50, slow=7), seed=1)
    expected = {step: stream.read(rank_positions(step, 8, 2, 1)) for step in range(20)}
    for first in (0, 13):
        with closing(Loader(stream, 8, ranks=2, rank=1, first_step=first, workers=workers)) as loader:
            for step, batch in islice(loader, 7):
                assert same(batch, expected[step])
            assert step == first + 6
            assert loader.wait_seconds > 0
    assert not threads_and_processes()


def test_loader_reads_token_files_in_workers(tmp_path: Path) -> None:
    file = write_token_arrays(tmp_path / "tokens.bin", [np.arange(200)], 256)
    stream = SampleStream(TokenWindows([file], 9), seed=0)
    stream.read(np.arange(4))  # maps the file here: the map must not travel
    with closing(Loader(stream, 4, workers=1)) as loader:
        assert same(next(loader)[1], stream.read(np.arange(4)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_read_the_same_samples(ranks: int) -> None:
    stream = SampleStream(Marks(24), seed=1)
    loaders = [Loader(stream, 8, ranks, rank) for rank in range(ranks)]
    batches = [torch.cat([next(loader)[1].tokens[:, 0] for loader in loaders]) for _ in range(3)]
    for loader in loaders:
        loader.close()
    assert torch.cat(batches).tolist() == stream.indices(np.arange(24)).tolist()
    assert sorted(torch.cat(batches).tolist()) == list(range(24))


def test_loader_reads_no_further_than_it_should() -> None:
    read: list[int] = []

    class Counted(Marks):
        def __getitem__(self, index: int) -> np.ndarray:
            read.append(index)
            return super().__getitem__(index)

    with closing(Loader(SampleStream(Counted(1000), 0), 2, prefetch=3)) as loader:
        next(loader)
        time.sleep(0.2)
        assert len(read) == 2 * (1 + 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_sample_is_named(workers: int) -> None:
    stream = SampleStream(Marks(40, wrong=11), seed=0, shuffle=False)
    with closing(Loader(stream, 4, workers=workers)) as loader:
        assert [step for step, _ in islice(loader, 2)] == [0, 1]  # what came before it still comes
        for _ in range(2):
            with pytest.raises(DataError, match="sample 11 of Marks cannot be read: ValueError: a torn picture"):
                next(loader)
    assert not threads_and_processes()


def test_the_death_of_a_worker_is_reported() -> None:
    stream = SampleStream(Marks(40, fatal=9), seed=0, shuffle=False)
    with closing(Loader(stream, 4, workers=2)) as loader:
        assert [step for step, _ in islice(loader, 2)] == [0, 1]
        with pytest.raises(DataError, match=r"step 2 \(samples 8, 9, 10, 11\) was killed by SIGKILL"):
            next(loader)
    assert not threads_and_processes()


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_at_any_moment_is_clean(workers: int) -> None:
    for wait in (0.0, 0.05):
        loader = Loader(SampleStream(Marks(40, slow=1), seed=0), 8, workers=workers)
        time.sleep(wait)
        loader.close()
        loader.close()
        assert not threads_and_processes()
        assert list(loader) == []


def test_a_dropped_loader_ends_too() -> None:
    loader = Loader(SampleStream(Marks(40), seed=0), 8)
    next(loader)
    del loader
    assert not threads_and_processes()


def test_workers_do_not_outlive_their_owner() -> None:
    # A killed owner's end of the pipe is closed by the kernel; closing it by hand is the same to the worker.
    process, pipe = _start_worker(_RankReader(SampleStream(Marks(40), seed=0), 8, 1, 0), first=0, stride=1)
    pipe.recv()
    pipe.close()
    process.join(30)
    assert process.exitcode == 0


# Mixtures


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), first=st.integers(0, 10**11), n=st.integers(1, 400)
)
def test_a_mixture_gives_each_source_its_share(weights: list[float], first: int, n: int) -> None:
    mixture = Mixture([Marks(5) for _ in weights], weights)
    which, own = mixture.locate(np.arange(first, first + n))
    for number, weight in enumerate(weights):
        mine = own[which == number]
        assert (
            mine.tolist() == list(range(mine[0], mine[0] + len(mine))) if len(mine) else True
        )  # none lost, none twice
        expected = weight / sum(weights) * n
        assert abs(len(mine) - expected) <= number + 2
    reached = mixture.locate(np.arange(n))
    assert all((reached[1][reached[0] == k] == np.arange((reached[0] == k).sum())).all() for k in range(len(weights)))


def test_sources_of_a_mixture_keep_their_own_epochs() -> None:
    mixture = Mixture([Marks(7), Marks(40)], [3, 1])
    stream = SampleStream(mixture, seed=1)
    found = stream.indices(np.arange(160))
    small, large = found[found < 7], found[found >= 7]
    assert len(small) == 120 and sorted(large.tolist()) == list(range(7, 47))
    epochs = small[:119].reshape(17, 7).tolist()
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len({tuple(e) for e in epochs}) > 10
    assert stream.indices(np.arange(90, 100)).tolist() == found[90:100].tolist()


def test_a_mixture_from_files_in_any_share(tmp_path: Path) -> None:
    folder_of(tmp_path / "texts", ["a" * 400])
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 900}) + "\n")
    write_token_arrays(tmp_path / "c.bin", iter([np.full(300, ord("c"))]), 256)
    mix = {str(tmp_path / "texts"): 0.5, str(tmp_path / "b.jsonl"): 0.3, f"tokens:{tmp_path / 'c.bin'}": 0.2}
    job = job_of("mix", mix=mix, validation_fraction=0.1)
    training, held, tokenizer = make_sources(job, tmp_path / "cache")
    assert isinstance(tokenizer, ByteTokenizer) and make_job(tomllib.loads(job.to_toml())) == job
    stream = SampleStream(training, seed=0)
    whole = stream.read(np.arange(100))
    letters = [chr(int(row.bincount().argmax())) for row in whole.tokens]
    assert [letters.count(letter) for letter in "abc"] == [50, 30, 20]
    assert {chr(int(row[0])) for row in SampleStream(held, 0, shuffle=False).read(np.arange(10)).tokens} == set("abc")
    for ranks, workers, first in ((2, 0, 3), (4, 2, 0)):
        for rank in range(ranks):
            with closing(Loader(stream, 20, ranks, rank, first_step=first, workers=workers)) as loader:
                step, batch = next(loader)
                assert torch.equal(batch.tokens, whole.tokens[rank_positions(step, 20, ranks, rank)])
    with pytest.raises(DataError, match="train it on one source") as caught:
        make_sources(job_of("mix", mix=mix, tokenizer="bpe:300", vocab=300), tmp_path / "cache")
    command = shlex.split(str(caught.value).split("`")[1])
    assert command[:3] == ["shardwise", "data", "mine.bin"]
    app(["data", str(tmp_path / "mine.bin"), *command[3:]], standalone_mode=False)
    assert "mine.tokenizer.json" in str(caught.value) and (tmp_path / "mine.tokenizer.json").exists()
    for wrong in ({"source": "mix"}, {"mix": {"a": 1}}, {"source": "mix", "mix": {"a": 0}}):
        with pytest.raises(JobError):
            make_job({"data": wrong})


# Bad records


def test_bad_lines_are_named_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = [json.dumps({"text": text}) for text in TEXTS]
    path.write_text("\n".join([good[0], "{", good[1], '{"txt": "x"}', "[]", good[2], '{"text": 5}']), encoding="utf-8")
    with pytest.raises(DataError, match='in.jsonl, line 2: not valid JSON .*With data.on_bad_record = "skip"'):
        make_sources(job_of("jsonl", path), tmp_path / "cache")
    for _ in range(2):  # encoded, and from the cache
        bad = BadRecords(skip=True, log_path=tmp_path / "bad.txt")
        training, _, _ = make_sources(
            job_of("jsonl", path, on_bad_record="skip", validation_fraction=0), tmp_path / "cache", bad
        )
        assert len(bad.messages) == 4 and bad.summary().startswith("4 bad records skipped. ")
        assert "line 2" in bad.summary() and "line 5" in bad.summary() and bad.summary().endswith("And 1 more.")
    (tmp_path / "good.jsonl").write_text("\n".join(good), encoding="utf-8")
    plain, _, _ = make_sources(job_of("jsonl", tmp_path / "good.jsonl", validation_fraction=0), tmp_path / "cache")
    assert all_of(training) == all_of(plain)
    asked = [f"data.path={path}", "data.source=jsonl", "data.on_bad_record=skip"]
    assert "4 bad records skipped" in encode_source(load_job(None, asked).data, tmp_path / "out.bin")
    with pytest.raises(DataError, match="line 2"):  # a cache with gaps is no cache of the whole
        make_sources(job_of("jsonl", path), tmp_path / "cache")


def test_bad_rows_of_clicks_keep_their_place_and_do_not_count(tmp_path: Path) -> None:
    line = "\t".join(["1", *(str(n) for n in range(13)), *(f"{n:08x}" for n in range(26))])
    (tmp_path / "day.tsv").write_text("\n".join([line, "1\tx", line, line.replace("1", "7", 1)]) + "\n")
    offsets, lines = index_criteo_file(DataFile.of(tmp_path / "day.tsv"))
    bad = BadRecords(skip=True, log_path=tmp_path / "bad.txt")
    source = CriteoClicks(DLRMConfig(rows=64, width=4), tmp_path / "day.tsv", offsets, 0, lines, bad)
    for workers in (0, 1):  # a worker writes the same file
        with closing(Loader(SampleStream(source, 0, shuffle=False), 4, workers=workers)) as loader:
            batches = [next(loader)[1] for _ in range(2)]
        assert all(batch.targets[:, 0].tolist() == [1, -100, 1, -100] for batch in batches)
        assert (
            bad.summary().startswith("2 bad records skipped. ") and "day.tsv, row 2: it has 2 fields" in bad.summary()
        )


def test_tokens_never_overwrite_what_they_are_made_from(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("a book " * 500)
    settings = ["data.source=text", f"data.path={book}"]
    for out, problem in ((book, "is one of the files to read"), (Path("/dev/null"), "is not a regular file"),
                         (tmp_path / "none" / "out.bin", "create it first")):  # fmt: skip
        with pytest.raises(UserError, match=problem):
            encode_source(load_job(None, settings).data, out)
    assert book.read_text() == "a book " * 500 and not (tmp_path / "none").exists()
    assert Path("/dev/null").is_char_device()
    assert "tokens" in encode_source(load_job(None, settings).data, tmp_path / "out.bin")
