"""The formats in which people have their data: each gives the same samples as plain text or images, in any order, and
each kind of damage is one sentence."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.comm.world import run_world
from shardwise.data.input_files import BadRecords, DataRecord
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.data.text import encode_source, source_by_name
from shardwise.errors import DataError
from shardwise.job import DataConfig, Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import IGNORE_INDEX
from shardwise.parallel.prepare import prepare
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.validate import open_validation_sets

DOCUMENTS = [f"Document {n}: " + "to be, or not to be? ünïcode " * (1 + n % 5) for n in range(40)]
LINES = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(DOCUMENTS)).encode()


def write_zstd(path: Path, content: bytes) -> None:
    arrow = pytest.importorskip("pyarrow")
    with arrow.CompressedOutputStream(arrow.OSFile(str(path), "wb"), "zstd") as file:
        file.write(content)


def write_parquet(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns or {"text": DOCUMENTS, "id": list(range(40))}), path, row_group_size=7)
    return path


def write_dataset(folder: Path, **options: Any) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(str(folder), **options)
    return folder


def write_text_shard(path: Path, documents: list[str]) -> None:
    """Writes samples as WebDataset does: text beside metadata and an image, or text in a JSON object."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for number, text in enumerate(documents):
            files = (
                {"txt": text.encode(), "json": b'{"url": "x"}'} if number % 2 else {"json": json.dumps({"text": text})}
            )
            for kind, content in {"jpg": b"no text", **files}.items():
                member = tarfile.TarInfo(f"part/{number:04d}.{kind}")
                content = content.encode() if isinstance(content, str) else content
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_format(kind: str, folder: Path) -> dict[str, Any]:
    """Writes the documents with the library that people use; returns the `[data]` section that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    packers = {"gz": gzip.compress, "bz2": bz2.compress}
    if kind in packers:
        if kind == "bz2":
            pytest.importorskip("pyarrow")
        (folder / f"a.jsonl.{kind}").write_bytes(
            packers[kind](LINES[:1000]) + packers[kind](LINES[1000:])
        )  # two members
        return {"source": "jsonl", "path": str(folder)}
    if kind == "zst":
        write_zstd(folder / "a.json.zst", LINES)
        return {"source": "jsonl", "path": str(folder)}
    if kind == "parquet":
        half = len(DOCUMENTS) // 2
        write_parquet(folder / "a.parquet", text=DOCUMENTS[:half])
        write_parquet(folder / "b.parquet", text=DOCUMENTS[half:])
        return {"source": "parquet", "path": str(folder)}
    if kind == "datasets":
        return {"source": "datasets", "path": str(write_dataset(folder / "saved", num_shards=3))}
    if kind.startswith("tar"):
        for number, part in enumerate((DOCUMENTS[:17], DOCUMENTS[17:])):
            write_text_shard(folder / f"shard-{number}.{kind}", part)
        return {"source": "text", "path": str(folder / f"shard-*.{kind}")}
    pytest.importorskip("datasets")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "train.jsonl").write_bytes(LINES)
    return {"source": "datasets", "path": f"stream:{folder / 'corpus'}", "samples": 1000}


FORMATS = ("gz", "bz2", "zst", "parquet", "datasets", "stream", "tar", "tar.gz")


def text_job(data: dict[str, Any], folder: Path, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "steps": 4, "precision": "float64", "model": {"layers": 2, "width": 16, "heads": 2, "sequence": 16},
        "batch": {"samples": 4}, "data": data, "checkpoint": {"every": 2, "snapshot_every": 0},
        "run": {"folder": str(folder / "run"), "device": "cpu"},
    }  # fmt: skip
    return make_job(values | changes)


def samples_of(source: Any) -> list[list[int]]:
    return [source[index].tolist() for index in range(len(source))]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_samples_of_plain_lines(tmp_path: Path, kind: str) -> None:
    (tmp_path / "plain.jsonl").write_bytes(LINES)
    plain = make_sources(text_job({"source": "jsonl", "path": str(tmp_path / "plain.jsonl")}, tmp_path), tmp_path / "c")
    job = text_job(write_format(kind, tmp_path / "data"), tmp_path)
    found = make_sources(job, tmp_path / "c")
    assert [samples_of(one) for one in found[:2]] == [samples_of(one) for one in plain[:2]] and len(plain[0]) > 50
    # Any number of ranks reads the same samples as one, from any step on.
    stream = SampleStream(found[0], seed=3)
    whole = [stream.read(rank_positions(step, 12, 1, 0)).tokens for step in range(3)]
    for ranks in (2, 3):
        parts = [stream.read(rank_positions(2, 12, ranks, rank)).tokens for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), whole[2])


def train_in_world(path: str, layout: str, resume: bool) -> None:
    run = RunFolder.open(Path(path))
    TrainingLoop(prepare(run.job(), Layout.parse(layout)), run, torch.device("cpu"), resume).run()


def losses(job: Job, folder: Path, *layouts: str) -> list[float]:
    """Returns the losses of a run that stops after half of its steps and goes on in the second layout, if any."""
    values = job.model_dump(exclude_none=True)
    run = RunFolder.create(make_job(values | {"run": {**values["run"], "folder": str(folder)}}))
    whole = run.job()
    for number, layout in enumerate(layouts):
        if len(layouts) > 1 and number == 0:  # as a run that is stopped: the same schedule, and half of its steps
            (run.path / "job.toml").write_text(make_job(values | {"steps": 2}).to_toml())
        prepare(run.job(), Layout.parse(layout))  # once, for all ranks
        run_world(train_in_world, Layout.parse(layout).world, str(run.path), layout, number > 0)
        (run.path / "job.toml").write_text(whole.to_toml())
    return [record["loss"] for record in run.metrics()]


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", ["parquet", "stream", "tar"])
def test_a_run_goes_on_exactly_in_another_layout(tmp_path: Path, kind: str) -> None:
    data = write_format(kind, tmp_path / "data")
    job = text_job(data, tmp_path, optimizer={"schedule": "constant", "warmup": 0})
    whole = losses(job, tmp_path / "whole", "")
    assert losses(job, tmp_path / "parts", "shard=2", "tensor=2") == pytest.approx(whole, rel=1e-10) and len(whole) == 4


def test_what_is_damaged_is_one_sentence(tmp_path: Path) -> None:
    """Each case: what is written, the source, and what the message must say."""

    def problem_of(source: str, path: Path | str, **data: Any) -> str:
        with pytest.raises(DataError) as caught:
            make_sources(text_job({"source": source, "path": str(path), **data}, tmp_path), tmp_path / "cache")
        return str(caught.value)

    for name, packed in {"a.jsonl.gz": gzip.compress(LINES), "b.txt.gz": gzip.compress(LINES)}.items():
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        source = "jsonl" if "jsonl" in name else "text"
        assert f"{name} cannot be read: Compressed file ended before the end-of-stream" in problem_of(
            source, tmp_path / name
        )
    assert "a.jsonl.gz cannot be read: Compressed file ended" in problem_of(
        "chat", tmp_path / "a.jsonl.gz", on_bad_record="skip"
    )
    (tmp_path / "c.jsonl.gz").write_bytes(b"no gzip at all")
    assert "c.jsonl.gz cannot be read: Not a gzipped file" in problem_of("jsonl", tmp_path / "c.jsonl.gz")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("Grüße".encode("latin-1")))
    assert "is not text: it must be UTF-8" in problem_of("text", tmp_path / "d.txt.gz")
    write_text_shard(tmp_path / "s.tar", DOCUMENTS[:4])
    (tmp_path / "t.tar").write_bytes((tmp_path / "s.tar").read_bytes()[:700])
    assert "t.tar cannot be read as a tar file: " in problem_of("text", tmp_path / "t.tar")
    assert "s.tar, part/0000: no field 'body' (data.text_field)" in problem_of(
        "text", tmp_path / "s.tar", text_field="body"
    )
    (tmp_path / "empty").mkdir()
    for source, end in {"jsonl": ".jsonl or .ndjson", "parquet": ".parquet", "datasets": ".arrow"}.items():
        assert f"the folder has no files that end in {end}; give" in problem_of(source, tmp_path / "empty")
    assert "splits" not in problem_of("datasets", tmp_path / "nothing")
    pytest.importorskip("pyarrow")
    write_zstd(tmp_path / "e.jsonl.zst", LINES)
    (tmp_path / "e.jsonl.zst").write_bytes((tmp_path / "e.jsonl.zst").read_bytes()[:-5])
    assert "e.jsonl.zst cannot be read: Truncated compressed stream" in problem_of("jsonl", tmp_path / "e.jsonl.zst")
    path = write_parquet(tmp_path / "f.parquet", content=["a"], txt=["b"], number=[3])
    assert "has no column 'text' (data.text_field); did you mean 'txt'" in problem_of("parquet", path)
    assert "row 1: field 'number' is 3, not a string" in problem_of("parquet", path, text_field="number")
    assert "For such files set data.source = 'parquet'" in problem_of("text", path)
    write_parquet(tmp_path / "g.parquet", text=["a" * 100, None, "b"])
    assert "g.parquet, row 2: field 'text' is None" in problem_of("parquet", tmp_path / "g.parquet")
    bad = BadRecords(skip=True)
    job = text_job({"source": "parquet", "path": str(tmp_path / "g.parquet"), "on_bad_record": "skip"}, tmp_path)
    make_sources(job, tmp_path / "cache", bad)
    assert bad.summary().startswith("1 bad record skipped.")
    content = write_parquet(tmp_path / "h.parquet").read_bytes()
    (tmp_path / "h.parquet").write_bytes(content[: len(content) // 2])
    assert "h.parquet cannot be read as a table: " in problem_of("parquet", tmp_path / "h.parquet")
    (tmp_path / "i.arrow").write_bytes(b"ARROW1" + bytes(50))
    assert "i.arrow cannot be read as a table: " in problem_of("datasets", tmp_path / "i.arrow")
    assert "set data.samples to the number of rows" in problem_of("datasets", "stream:some/corpus")


def test_splits_and_caches_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"text": DOCUMENTS})
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"has several splits; name one, for example .*both/train\."):
        make_sources(text_job({"source": "datasets", "path": str(tmp_path / "both")}, tmp_path), tmp_path / "c")
    train = {"source": "datasets", "path": str(tmp_path / "both" / "train")}
    before = samples_of(make_sources(text_job(train, tmp_path), tmp_path / "c")[0])
    (tmp_path / "both" / "train" / "cache-0123.arrow").write_bytes(b"what map() leaves there")
    assert samples_of(make_sources(text_job(train, tmp_path), tmp_path / "c")[0]) == before
    missing = {"source": "datasets", "path": f"stream:{tmp_path / 'none'}", "samples": 3}
    with pytest.raises(DataError, match=r"data.path = 'stream:.*none': \w+(Error|NotFound): "):
        make_sources(text_job(missing, tmp_path), tmp_path / "c")


def test_a_stream_is_read_no_further_than_asked(tmp_path: Path) -> None:
    data = write_format("stream", tmp_path) | {"samples": 10}
    told = encode_source(DataConfig(**data), tmp_path / "out.bin")
    assert "from 10 documents" in told


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.parquet", "datasets", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl.zst").touch()
    for data, extra in (
        ({"source": "parquet", "path": str(tmp_path / "a.parquet")}, "arrow"),
        ({"source": "jsonl", "path": str(tmp_path / "a.jsonl.zst")}, "arrow"),
        ({"source": "datasets", "path": "stream:a/b", "samples": 3}, "datasets"),
    ):
        with pytest.raises(DataError, match=rf"needs the \w+ package; `pip install shardwise\[{extra}\]`"):
            make_sources(text_job(data, tmp_path), tmp_path / "c")
    with pytest.raises(DataError, match=r"pip install shardwise\[images\]"):
        make_sources(image_job(tmp_path))


def test_names_say_the_source(tmp_path: Path) -> None:
    names = {
        "a.jsonl.gz": "jsonl",
        "c4.json.gz": "jsonl",
        "a.txt.zst": "text",
        "a.json": "text",
        "b.parquet": "parquet",
    }
    names |= {"x/data-00000-of-00001.arrow": "datasets", "stream:org/name": "datasets", "a.bin:uint16": "tokens"}
    assert {name: source_by_name(name)[0] for name in names} == names
    assert source_by_name("parquet:folder") == ("parquet", "folder")
    assert source_by_name("datasets:stream:a/b") == ("datasets", "stream:a/b")


def test_a_mixture_of_formats_and_sets_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"To be, or not to be. " * 50))
    parquet, jsonl = write_format("parquet", tmp_path / "p")["path"], write_format("gz", tmp_path / "j")["path"]
    mix = {str(tmp_path / "a.txt.gz"): 1.0, f"parquet:{parquet}": 2.0, f"jsonl:{jsonl}": 1.0}
    training = make_sources(text_job({"source": "mix", "mix": mix}, tmp_path), tmp_path / "c")[0]
    assert len(training.sources) == 3
    sets = {"rows": f"parquet:{parquet}", "lines": {"path": jsonl, "source": "jsonl"}}
    job = text_job({"source": "text", "path": str(tmp_path / "a.txt.gz"), "validation_fraction": 0.0}, tmp_path,
                   validation={"sets": sets})  # fmt: skip
    run = RunFolder.create(job)
    train_in_process(run)
    found = list(run.metrics())[-1]["validation"]
    assert (
        found["loss"] == pytest.approx((found["rows"]["loss"] + found["lines"]["loss"]) / 2) and "held_out" not in found
    )


def train_in_process(run: RunFolder) -> None:
    TrainingLoop(prepare(run.job(), Layout.parse("")), run, torch.device("cpu"), False).run()


# Images


def image_job(path: Path, **data: Any) -> Job:
    return make_job({
        "steps": 4, "precision": "float64", "batch": {"samples": 4}, "checkpoint": {"every": 2, "snapshot_every": 0},
        "model": {"name": "resnet", "depth": 18, "width": 4, "stem": "cifar", "image_size": 16, "num_classes": 3},
        "data": {"source": "images", "path": str(path), **data}, "run": {"device": "cpu"},
        "optimizer": {"schedule": "constant", "warmup": 0},
    })  # fmt: skip


def picture(label: int, number: int, kind: str = "png", size: tuple[int, int] = (24, 18)) -> bytes:
    image, file = pytest.importorskip("PIL.Image"), io.BytesIO()
    pixels = np.random.default_rng((label, number)).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_folder(folder: Path, count: int = 20) -> Path:
    for label, name in enumerate(("ants", "bees", "cats")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number:03}.png").write_bytes(picture(label, number))
    return folder


def write_shards(folder: Path, count: int = 20) -> Path:
    """The same images in the same order, as the library writes them."""
    webdataset = pytest.importorskip("webdataset")
    folder.mkdir()
    for label in range(3):
        with webdataset.TarWriter(str(folder / f"shard-{label}.tar")) as tar:
            for number in range(count):
                tar.write({"__key__": f"{label}{number:03}", "png": picture(label, number), "cls": label})
    return folder


def test_shards_are_the_folder(tmp_path: Path) -> None:
    folder, shards = write_folder(tmp_path / "images"), write_shards(tmp_path / "shards")
    (folder / "ants" / ".hidden.png").write_bytes(b"")
    (folder / "ants" / "notes.txt").write_text("no image")
    one, other = make_sources(image_job(folder), tmp_path / "c"), make_sources(image_job(shards), tmp_path / "c")
    assert [len(source) for source in one[:2]] == [59, 1]
    for a, b in zip(one[:2], other[:2], strict=True):
        images, targets = a.read_images(np.arange(len(a)))
        assert np.array_equal(images, b.read_images(np.arange(len(b)))[0]) and set(targets) <= {0, 1, 2}
    assert len(set(one[0].read_images(np.arange(12))[1])) == 3  # not sorted by class
    image = pytest.importorskip("PIL.Image")
    path = one[0].paths[int(one[0].index[5, 0])]
    plain = image.open(path).crop((3, 0, 21, 18)).resize((16, 16), image.Resampling.BILINEAR)
    plain = (np.asarray(plain, np.float64) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    read = one[0].read_images(np.array([5]))[0][0]
    assert np.allclose(read[:, :, 1:-1], plain.transpose(2, 0, 1)[:, :, 1:-1], atol=0.02)  # edges differ


@pytest.mark.parametrize("write", [write_shards])
def test_images_go_on_exactly_in_another_layout(tmp_path: Path, write: Any) -> None:
    job = image_job(write(tmp_path / "data"), augment=["crop", "flip"])
    whole = losses(job, tmp_path / "whole", "")
    assert losses(job, tmp_path / "parts", "shard=2", "") == pytest.approx(whole, rel=1e-9)


def test_a_folder_for_validation(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", 5)
    write_folder(tmp_path / "val", 2)
    record = DataRecord()
    training, held_out, _ = make_sources(image_job(tmp_path, augment=["flip"]), record=record)
    assert (len(training), len(held_out)) == (15, 6) and training.augment is not None and held_out.augment is None
    record.is_new = False
    assert not record.changes()
    sets = {"mine": {"path": str(tmp_path / "val"), "source": "images"}}
    job = make_job(
        image_job(tmp_path / "train", augment=["flip"]).model_dump(exclude_none=True) | {"validation": {"sets": sets}}
    )
    opened = open_validation_sets(job, None)["mine"]
    plain, seen = opened.read_images(np.arange(6))[0], opened.samples(np.arange(6), np.arange(6)).tokens.numpy()
    assert len(opened) == 6 and np.array_equal(plain, seen)  # not augmented
    (tmp_path / "val" / "ants" / "000.png").unlink()
    assert record.changes() == [f"the files in {tmp_path / 'val'} have changed"]


def test_what_is_wrong_with_images_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("PIL")

    def problem_of(path: Path | str) -> str:
        with pytest.raises(DataError) as caught:
            make_sources(image_job(path), tmp_path / "cache")  # type: ignore[arg-type]
        return str(caught.value)

    def tar_of(name: str, **files: bytes) -> Path:
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as tar:
            for key, content in files.items():
                info = tarfile.TarInfo(key.replace("__", "."))
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    assert "empty has no images: it needs a subfolder for each class" in problem_of(tmp_path / "empty")
    (tmp_path / "two" / "a").mkdir(parents=True)
    (tmp_path / "two" / "a" / "1.png").write_bytes(picture(0, 0))
    assert "has 1 subfolders of classes, but model.num_classes is 3" in problem_of(tmp_path / "two")
    assert "data.source = 'images' needs data.path" in problem_of("")
    assert "no such file or folder" in problem_of(tmp_path / "nope")
    good = {"./a b__png": picture(0, 0), "./a b__cls": b"2\n"}
    assert "_x__png".replace("__", ".") in problem_of(tar_of("b.tar", _x__png=b"", **good))  # no class beside it
    assert "class '3' in its .cls; write a number below 3 to it" in problem_of(
        tar_of("c.tar", a__png=picture(0, 0), a__cls=b"3")
    )
    assert "class 'dog' in its .cls" in problem_of(tar_of("d.tar", a__png=picture(0, 0), a__cls=b"dog"))
    assert "has no images with classes" in problem_of(tar_of("e.tar", a__txt=b"x", a__cls=b"1"))
    assert "f.tar.gz cannot be read as a plain tar file" in problem_of(tar_of("f.tar.gz", **good))
    whole = tar_of("g.tar", **good, **{f"{n}__png": picture(0, n) for n in range(9)}).read_bytes()
    (tmp_path / "g.tar").write_bytes(whole[: len(whole) // 3])
    assert "g.tar cannot be read as a plain tar file: unexpected end of data" in problem_of(tmp_path / "g.tar")
    # Odd names: folders, capitals, several dots, and what macOS leaves.
    odd = {
        "a/1.LEFT__JPG": picture(0, 1, "jpeg"),
        "a/1__cls": b"1",
        "b/1__webp": picture(1, 1, "png"),
        "b/1__cls": b"0",
    }
    odd |= {"a/.__1__png": b"x", "a/README": b"x", "1__png/": b"", "ü/ß__png": picture(2, 2), "ü/ß__cls": b"2"}
    job = image_job(tar_of("h.tar", **odd), validation_fraction=0.0)
    training = make_sources(job, tmp_path / "cache")[0]
    assert sorted(training.read_images(np.arange(len(training)))[1].tolist()) == [0, 1, 2]


def test_a_damaged_image_is_named_or_does_not_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", 3)
    (folder / "bees" / "001.png").write_bytes(picture(1, 1)[:100])
    source = make_sources(image_job(folder, validation_fraction=0.0))[0]
    with pytest.raises(DataError, match=r'bees/001.png: no image can be read .*on_bad_record = "skip"'):
        source.read_images(np.arange(9))
    source = make_sources(image_job(folder, validation_fraction=0.0, on_bad_record="skip"))[0]
    assert sorted(source.read_images(np.arange(9))[1].tolist()) == [IGNORE_INDEX, 0, 0, 0, 1, 1, 2, 2, 2]
