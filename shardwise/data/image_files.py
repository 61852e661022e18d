"""Images in a folder with a subfolder for each class, or in tar shards of WebDataset (`NAME.jpg` beside `NAME.cls`).

Their places are read once, into an index of (file, offset, size, class), so that any sample can be read at any time.
Images are cut to their middle square, scaled, and normalised by the statistics of ImageNet."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.images import ImageSource
from shardwise.data.input_files import BadRecords, DataFile
from shardwise.data.text import walk_files
from shardwise.data.token_file import write_data_file
from shardwise.errors import DataError
from shardwise.files import import_extra
from shardwise.models.chain import IGNORE_INDEX

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif")
IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)[..., None, None]  # mean and deviation


class ImageFiles(ImageSource):
    """The images of an index (n, 4). A skipped bad image keeps its stream position, with an ignored target."""

    def __init__(self, paths: Sequence[Path], index: np.ndarray, model: Any, bad: BadRecords, augment: Any = None):
        super().__init__(len(index), model.image_size, model.num_classes, augment)
        self.paths, self.index, self.bad_records = paths, index, bad

    def read_images(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        targets = self.index[indices, 3].copy()
        pixels = np.zeros((len(indices), 3, self.image_size, self.image_size), np.float32)
        for place, (number, offset, size, _) in enumerate(self.index[indices].tolist()):
            try:
                with self.paths[number].open("rb") as file:
                    file.seek(offset)
                    pixels[place] = _decode(file.read(size), self.image_size)
            except Exception as error:  # Pillow has no class for all that a damaged image can raise
                where = f"{self.paths[number]}, byte {offset:,}".removesuffix(", byte 0")
                self.bad_records.report(DataError(f"{where}: no image can be read ({type(error).__name__}: {error})."))
                targets[place] = IGNORE_INDEX
        return pixels, targets


def _decode(content: bytes, image_size: int) -> np.ndarray:
    module = import_extra("PIL.Image", "images", "data.source = 'images'")
    image = module.open(io.BytesIO(content)).convert("RGB")
    left, top = ((length - min(image.size)) / 2 for length in image.size)
    box, bilinear = (left, top, image.width - left, image.height - top), module.Resampling.BILINEAR
    scaled = np.asarray(image.resize((image_size, image_size), bilinear, box, reducing_gap=3), np.float32)
    return np.asarray((scaled.transpose(2, 0, 1) / np.float32(255) - IMAGENET[0]) / IMAGENET[1])


def index_folder(folder: Path, num_classes: int) -> tuple[list[Path], np.ndarray]:
    """Returns the images of a folder and their index; the classes are its subfolders in the order of their names."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(path, n) for n, one in enumerate(classes) for path in walk_files(one) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(f"{folder} has no images: it needs a subfolder for each class, or .tar shards of WebDataset.")
    if len(classes) != num_classes:
        problem = f"{folder} has {len(classes)} subfolders of classes, but model.num_classes is {num_classes}"
        raise DataError(f"{problem}; set it, or add empty subfolders for classes without images.")
    return [path for path, _ in found], np.array([(n, 0, -1, label) for n, (_, label) in enumerate(found)], np.int64)


def index_shards(files: Sequence[DataFile], num_classes: int, bad_records: BadRecords, out: Path) -> None:
    rows = []
    for number, path in enumerate(file.path for file in files):
        images, labels = dict[str, tarfile.TarInfo](), dict[str, bytes]()
        try:
            with tarfile.open(path, "r:") as tar:
                for member in filter(tarfile.TarInfo.isreg, tar):
                    parent, _, name = member.name.rpartition("/")
                    key, _, kind = name.partition(".")  # as in WebDataset: `a.left.jpg` belongs to `a`
                    if key and kind == "cls":
                        labels[f"{parent}/{key}"] = tar.extractfile(member).read(20).strip()  # type: ignore[union-attr]
                    elif key and f".{kind}".lower().endswith(SUFFIXES):
                        images.setdefault(f"{parent}/{key}", member)
        except (tarfile.TarError, OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as a plain tar file: {error}. Unpack or copy it again.") from None
        for key, member in images.items():
            if (label := labels.get(key, b"")).isdigit() and int(label) < num_classes:
                rows.append((number, member.offset_data, member.size, int(label)))
                continue
            found = f"class {label.decode(errors='replace')!r} in its .cls" if key in labels else "no .cls beside it"
            bad_records.report(DataError(f"{path}, {member.name}: {found}; write a number below {num_classes} to it."))
    if not rows:
        raise DataError(f"data.path: {files[0].path} has no images with classes: NAME.jpg with NAME.cls beside it.")
    with write_data_file(out) as file:
        np.save(file, np.array(rows, np.int64))
