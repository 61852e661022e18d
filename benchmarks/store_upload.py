"""The rate at which a checkpoint is copied to an object store, against that of fsspec's own `put` of the same files.

    python benchmarks/store_upload.py --url file:///mnt/store/rate --files 8 --mib 64

Both are measured in turn, `--repeats` times; the medians are compared. The URL must be empty; it is emptied afterwards.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from pathlib import Path

from shardwise.job import make_job
from shardwise.object_store import ObjectStore
from shardwise.train.checkpoint_folder import write_manifest
from shardwise.train.run_folder import RunFolder
from shardwise.train.run_store import RunStore
from shardwise.train.run_uploader import RunUploader
from shardwise.workers.run_owner import own_run


def save(folder: Path, step: int, files: int, size: int) -> Path:
    path, infos = folder / "checkpoints" / f"step-{step:08d}", {}
    path.mkdir(parents=True)
    for number in range(files):
        content = os.urandom(size)
        (path / f"__{number}_0.distcp").write_bytes(content)
        infos[f"__{number}_0.distcp"] = {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path, {"step": step, "state": {"step": step}, "files": infos})
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SHARDWISE_CACHE"] = scratch
        store = RunStore(RunFolder.create(make_job({"run": {"folder": options.url}})).path)
        uploader = RunUploader(store, lambda kind, message: print(kind, message), keep=1)
        remote, size = store.remote, options.mib << 20
        times: dict[str, list[float]] = {"copy": [], "put": []}
        with own_run(store.folder, print), store.claimed(print, lambda: None):
            for step in range(1, options.repeats + 1):
                path = save(store.folder, step, options.files, size)
                begin = time.perf_counter()
                assert uploader._try(at_once=True)
                times["copy"].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                remote.fs.put(f"{path}/", f"{remote.root}/put/{step}/", recursive=True)
                times["put"].append(time.perf_counter() - begin)
        total = options.files * options.mib
        for name, seconds in times.items():
            print(f"{name}: {total / statistics.median(seconds):.0f} MiB/s, median of {options.repeats}")
        ratio = statistics.median(times["put"]) / statistics.median(times["copy"])
        print(
            f"{options.files} files of {options.mib} MiB are copied at {100 * ratio:.0f}% of the rate of fsspec's put"
        )
        ObjectStore(options.url).delete(remote.list())


if __name__ == "__main__":
    main()
