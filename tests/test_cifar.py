"""CIFAR-10's files in both versions, images changed on the fly, and what is done about bad records."""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardwise.comm.world import run_world
from shardwise.data.images import MEAN, STD, TEST_FILE, TRAIN_FILES, ImageAugmentation, SyntheticImages, open_cifar10
from shardwise.data.input_files import BadRecords
from shardwise.data.loader import Loader
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import Samples, SampleStream, rank_positions
from shardwise.errors import DataError, JobError
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.resnet import ClassifierHead
from shardwise.parallel.prepare import prepare
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.verify.parity import verify

ALL = ("crop", "flip", "colour", "cutout")
MODEL = {"name": "resnet", "depth": 18, "width": 4, "stem": "cifar", "image_size": 32, "num_classes": 10}


def written(folder: Path, count: int = 12) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Six small files as they are published; returns what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {}
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        draw = np.random.default_rng(number)
        images, classes = draw.integers(0, 256, (count, 3072)).astype(np.uint8), draw.integers(0, 10, count)
        content[name] = images, classes
        (folder / f"{name}.bin").write_bytes(np.hstack([classes[:, None].astype(np.uint8), images]).tobytes())
    return content


def same(a: Samples, b: Samples) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "targets", "ids"))


def test_the_binary_version_is_read(tmp_path: Path) -> None:
    content = written(tmp_path / "cifar-10-batches-bin")
    for path in (tmp_path, tmp_path / "cifar-10-batches-bin"):
        training, test = open_cifar10(str(path), BadRecords(), None)
        assert (len(training), len(test), training.length, training.vocab) == (60, 12, 3072, 10)
    images, classes = training.read_images(np.array([0, 59, 13]))
    for image, label, (name, place) in zip(images, classes, [(0, 0), (4, 11), (1, 1)], strict=True):
        raw, known = content[TRAIN_FILES[name]]
        plain = (raw[place].reshape(3, 32, 32) / 255 - MEAN) / STD
        assert label == known[place] and np.allclose(image, plain, atol=1e-5)
    assert test.read_images(np.arange(12))[1].tolist() == content[TEST_FILE][1].tolist()
    again = pickle.loads(pickle.dumps(training))  # as it goes to a worker
    assert np.array_equal(again.read_images(np.arange(60))[0], training.read_images(np.arange(60))[0])
    assert len(pickle.dumps(training)) < 20_000


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "none")):
        with pytest.raises(DataError, match="cs.toronto.edu/~kriz/cifar.html, and set it to"):
            open_cifar10(path, BadRecords(), None)
    written(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match="data_batch_3.bin is missing; unpack the archive"):
        open_cifar10(str(tmp_path), BadRecords(), None)
    data = {"source": "cifar10", "path": str(tmp_path)}
    with pytest.raises(DataError, match="model.image_size = 32 and model.num_classes = 10"):
        make_sources(make_job({"model": {**MODEL, "image_size": 64}, "data": data}))
    with pytest.raises(DataError, match="has images, but model.name = 'gpt'"):
        make_sources(make_job({"data": data}))
    with pytest.raises(JobError, match="data.augment applies to images, but a decoder reads none"):
        make_job({"data": {"augment": ["flip"]}})


def test_bad_images_are_named_and_passed_over(tmp_path: Path) -> None:
    content = written(tmp_path)
    name, (images, classes) = TRAIN_FILES[2], content[TRAIN_FILES[2]]
    classes = classes.copy()
    classes[[3, 7]] = 200, 10
    records = np.hstack([classes[:, None].astype(np.uint8), images])
    (tmp_path / f"{name}.bin").write_bytes(records.tobytes() + b"rest")
    place = r"data_batch_3\S*, record 4 \(byte 9,219\)"
    with pytest.raises(DataError, match=rf"{place}: class 200, .*data.on_bad_record = \"skip\""):
        open_cifar10(str(tmp_path), BadRecords(), None)
    bad = BadRecords(skip=True, log_path=tmp_path / "bad.txt")
    training, _ = open_cifar10(str(tmp_path), bad, None)
    assert len(training) == 58 and len((tmp_path / "bad.txt").read_text().splitlines()) == 3
    kept = np.delete(content[name][1], [3, 7])
    assert training.read_images(np.arange(24, 34))[1].tolist() == kept.tolist()
    assert bad.summary().startswith("3 bad records skipped") and "ends after 4 of 3,073 bytes" in bad.summary()


# Augmentation


def test_each_change_does_what_it_says() -> None:
    plain = SyntheticImages(40, 16, 5, seed=1)
    images, classes = plain.read_images(np.arange(40))
    places = np.arange(40) + 7
    moved = ImageAugmentation(["crop"], 0).apply(images, places)
    wider = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))
    parts = [[wider[:, :, y : y + 16, x : x + 16] for x in range(5)] for y in range(5)]
    found = [
        {(y, x) for y in range(5) for x in range(5) if np.array_equal(moved[i], parts[y][x][i])} for i in range(40)
    ]
    assert all(len(one) == 1 for one in found) and len(set.union(*found)) > 10
    flipped = ImageAugmentation(["flip"], 0).apply(images, places)
    mirrored = [np.array_equal(a, b[:, :, ::-1]) for a, b in zip(flipped, images, strict=True)]
    kept = [np.array_equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True)) and 8 < sum(mirrored) < 32
    coloured = ImageAugmentation(["colour"], 0).apply(images, places)
    assert 0.01 < np.abs(coloured - images).mean() < 0.3
    cut = ImageAugmentation(["cutout"], 0).apply(images, places)
    holes = (cut == 0).all(1).sum((1, 2))
    assert np.array_equal(cut[cut != 0], images[cut != 0]) and holes.max() == 64 and holes.min() >= 16


def test_samples_depend_on_their_place_alone(tmp_path: Path) -> None:
    """Ranks, workers, batch sizes and a resume change nothing; another epoch or seed does."""
    written(tmp_path)
    augment = ImageAugmentation(ALL, seed=3)
    stream = SampleStream(open_cifar10(str(tmp_path), BadRecords(), augment)[0], seed=3)
    whole = stream.read(np.arange(96))
    for place in (0, 17, 95):
        assert same(
            stream.read(np.array([place])),
            Samples(*(t[place : place + 1] for t in (whole.tokens, whole.targets, whole.ids))),
        )
    for ranks, workers, first in ((1, 2, 0), (4, 0, 2), (2, 1, 1)):
        for rank in range(ranks):
            with closing(Loader(stream, 24, ranks, rank, first_step=first, workers=workers)) as loader:
                for number, batch in (next(loader) for _ in range(2)):
                    places = rank_positions(number, 24, ranks, rank)
                    assert torch.equal(batch.tokens, whole.tokens[places]) and torch.equal(
                        batch.targets, whole.targets[places]
                    )
    again = stream.indices(np.arange(120)).tolist()
    place = again.index(again[5], 60)
    assert not torch.equal(stream.read(np.array([place])).tokens[0], whole.tokens[5])
    assert not np.array_equal(
        ImageAugmentation(ALL, 4).apply(whole.tokens.numpy(), np.arange(96)),
        augment.apply(whole.tokens.numpy(), np.arange(96)),
    )


def test_the_head_counts_correct_classes() -> None:
    head = ClassifierHead(6, 5).double()
    torch.nn.init.normal_(head.weight), torch.nn.init.normal_(head.bias)
    x, classes = torch.randn(4, 6, 2, 2, dtype=torch.float64), torch.tensor([0, 4, 2, 1])
    targets = classes[:, None].clone()
    assert torch.allclose(head(x, targets=targets), F.cross_entropy(head(x)[:, 0], classes, reduction="sum"))
    head.eval()
    for _ in range(2):  # as a validation in two micro-batches
        head(x, targets=targets)
    assert int(head.num_correct) == 2 * int((head(x)[:, 0].argmax(-1) == classes).sum())
    targets[2] = IGNORE_INDEX
    keep = torch.tensor([0, 1, 3])
    assert torch.allclose(head(x, targets=targets), F.cross_entropy(head(x)[keep, 0], classes[keep], reduction="sum"))


@pytest.mark.thin(5)
@pytest.mark.parametrize("layout", ["replicate=3", "shard=2 zero=3"])
def test_layouts_agree_on_augmented_images(layout: str) -> None:
    model = {**MODEL, "image_size": 8, "num_classes": 5}
    job = make_job(
        {
            "precision": "float64",
            "model": model,
            "batch": {"samples": 12},
            "data": {"source": "synthetic", "augment": ALL},
        }
    )
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


# Training


def train(folder: Path, job: Any, layout: str) -> None:
    TrainingLoop(prepare(job, Layout.parse(layout)), RunFolder(folder), torch.device("cpu")).run()


def test_accuracy_and_bad_records_of_a_run(tmp_path: Path) -> None:
    written(tmp_path / "data")
    with (tmp_path / "data" / "data_batch_1.bin").open("ab") as file:
        file.write(b"torn")
    data = {"source": "cifar10", "path": str(tmp_path / "data"), "augment": ["crop", "flip"], "on_bad_record": "skip"}
    job = make_job({"steps": 2, "model": MODEL, "data": data, "batch": {"samples": 8}, "validation": {"samples": 12}})
    told = []
    for layout in ("pipeline=1", "replicate=2"):
        folder = tmp_path / layout
        folder.mkdir()
        prepare(job, Layout.parse(layout))  # once, for all ranks
        run_world(train, Layout.parse(layout).world, folder, job, layout)
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        (validation,) = [event for event in events if event["event"] == "validation"]
        assert f"{100 * validation['accuracy']:.1f}% accuracy" in validation["message"]
        assert (validation["accuracy"] * 12).is_integer()
        (bad,) = [event for event in events if event["event"] == "bad_records"]
        assert "1 bad record skipped" in bad["message"] and "data_batch_1.bin, record 13" in bad["message"]
        told.append((validation["accuracy"], validation["loss"]))
    assert told[0] == pytest.approx(told[1], rel=1e-4)
