"""Rows of tables: parquet files, the Arrow files that `Dataset.save_to_disk` of Hugging Face writes, streamed datasets.

Only `stream:NAME?split=train&name=CONFIG&revision=COMMIT` needs the package `datasets`; the options are those of
`load_dataset`. A stream cannot go back, so its first `data.samples` rows are read once, into the run's token file."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from shardwise.errors import DataError, shorten, suggest
from shardwise.files import import_extra
from shardwise.job import DataConfig

STREAM = "stream:"


def read_rows(path: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a file, each with words that say where it is; of the columns only `field`."""
    arrow, parquet = (import_extra(name, "arrow", str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    number, is_parquet = 0, path.suffix == ".parquet"
    try:
        table = parquet.ParquetFile(path) if is_parquet else arrow.ipc.open_stream(arrow.memory_map(str(path)))
        names = (table.schema_arrow if is_parquet else table.schema).names
        if field not in names:
            raise DataError(f"{path} has no column {field!r} (data.text_field); {suggest(field, names)}")
        for batch in table.iter_batches(1000, columns=[field]) if is_parquet else table:
            for number, text in enumerate(batch.column(field).to_pylist(), start=number + 1):  # noqa: B020
                yield f"{path}, row {number}", {field: text}
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        place, reason = f" after row {number:,}" if number else "", shorten(str(error).splitlines()[0])
        raise DataError(f"{path} cannot be read as a table{place}: {reason}. Write or copy it again.") from None


def stream_rows(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the first `data.samples` rows of a dataset on the Hub, or of a folder, without downloading the rest."""
    if "samples" not in data.model_fields_set:
        raise DataError(f"data.path = {data.path!r} may be endless; set data.samples to the number of rows to take.")
    name, _, query = data.path.removeprefix(STREAM).partition("?")
    datasets, options = import_extra("datasets", "datasets", data.path), {"split": "train", **dict(parse_qsl(query))}
    try:
        rows = islice(datasets.load_dataset(name, streaming=True, **options), data.samples)
        yield from ((f"{data.path}, row {number}", row) for number, row in enumerate(rows, start=1))
    except Exception as error:  # of the library, the network or a file: hundreds of kinds
        raise DataError(f"data.path = {data.path!r}: {type(error).__name__}: {shorten(str(error))}.") from None
