"""Batches of one data rank, made ready while the devices compute.

A thread keeps `prefetch` batches ahead. It reads them itself, which is enough for tokens (a memory map and a copy), or
takes them from worker processes, which costly samples need. Worker w of n makes steps w, w + n, ...; the thread asks
them in turn, so batches come in the order of the steps whatever the workers' speed, and a worker that is ahead waits at
its pipe. The state is the number of the next step: to resume is to start there.

PyTorch's DataLoader is not used: its order lives in a sampler's state, and of a worker's death it tells a process id.
Workers come from multiprocessing's fork server (safe with threads and CUDA, torch imported once); the server itself
belongs to Python, is shared by all loaders and ends with the program. Workers end when the loader is closed, when it is
collected, and when its process is killed: the closed pipe tells them.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import NoReturn

import numpy as np
import torch

from shardwise.console import pluralize
from shardwise.data.sample_stream import Samples, SampleStream, rank_positions
from shardwise.errors import DataError

SkippedBatches = Sequence[tuple[int, int]]
"""Batches that are left out: from which step on, and how many."""
BatchIterator = Generator[tuple[int, Samples], None, None]
ReadyQueue = queue.SimpleQueue[tuple[int, Samples] | BaseException | None]
_CPU = torch.device("cpu")
_POLL_SECONDS = 0.1
"""Seconds between looks at the stop flag while a worker is slow; a batch that arrives is taken at once."""


@dataclass(frozen=True)
class _RankReader:
    """What one data rank reads, step by step."""

    stream: SampleStream
    batch_size: int
    ranks: int
    rank: int
    skipped_batches: SkippedBatches = ()

    def positions(self, step: int) -> np.ndarray:
        step += sum(batches for first_skipped, batches in self.skipped_batches if first_skipped <= step)
        return rank_positions(step, self.batch_size, self.ranks, self.rank)

    def read(self, step: int) -> Samples:
        return self.stream.read(self.positions(step))


class Loader:
    """An endless iterator of (step, batch) from `first_step` on; a context manager that closes itself."""

    def __init__(
        self,
        stream: SampleStream,
        global_batch_size: int,
        ranks: int = 1,
        rank: int = 0,
        first_step: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        device: torch.device = _CPU,
        skipped_batches: SkippedBatches = (),
    ):
        """`samples_per_batch` counts the whole batch of all `ranks` together. For CUDA devices memory is pinned."""
        if global_batch_size % ranks:
            raise DataError(
                f"a batch of {pluralize(global_batch_size, 'sample')} does not divide among {ranks} data ranks; "
                f"use {max(1, global_batch_size // ranks) * ranks}."
            )
        self.wait_seconds = 0.0
        """How long the consumer has waited for batches so far."""
        self._ready: ReadyQueue = queue.SimpleQueue()
        self._slots = threading.Semaphore(prefetch)
        self._failure: BaseException | None = None
        reader = _RankReader(stream, global_batch_size, ranks, rank, skipped_batches)
        stop = threading.Event()
        batches = (
            _read_in_workers(reader, first_step, workers, stop) if workers else _read_in_thread(reader, first_step)
        )
        # The thread must not hold the loader itself, or one that is dropped without a close would never be collected.
        arguments = (batches, self._ready, self._slots, stop, device)
        thread = threading.Thread(target=_prefetch_loop, args=arguments, name="shardwise-data", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _stop_prefetching, thread, stop, self._slots)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> tuple[int, Samples]:
        if self._failure is not None:
            raise self._failure
        if not self._finalizer.alive:
            raise StopIteration
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - start
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            self._failure = item
            self.close()
            raise item
        self._slots.release()
        return item

    def close(self) -> None:
        """Ends the thread and the workers; may be called again."""
        self._finalizer()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prefetch_loop(
    batches: BatchIterator, ready: ReadyQueue, slots: threading.Semaphore, stop: threading.Event, device: torch.device
) -> None:
    """The thread: one batch for each free slot, until it is told to stop; its error is the last thing it hands over."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # per thread; pinning would otherwise open a context on the first device
        with closing(batches):
            while slots.acquire() and not stop.is_set():
                item = next(batches, None)
                if item is None:
                    return
                ready.put((item[0], _pin_memory(item[1])) if device.type == "cuda" else item)
    except BaseException as error:
        ready.put(error)
    finally:
        ready.put(None)  # whoever still waits is told that nothing comes any more


def _stop_prefetching(thread: threading.Thread, stop: threading.Event, slots: threading.Semaphore) -> None:
    stop.set()
    slots.release()
    if thread is not threading.current_thread():  # a loader may be collected in any thread, its own too
        thread.join()


def _pin_memory(batch: Samples) -> Samples:
    return Samples(*(part.pin_memory() for part in batch.tensors))


def _read_in_thread(reader: _RankReader, first_step: int) -> BatchIterator:
    for step in count(first_step):
        yield step, reader.read(step)


# Workers


def _read_in_workers(reader: _RankReader, first_step: int, workers: int, stop: threading.Event) -> BatchIterator:
    pool: list[tuple[BaseProcess, Connection]] = []
    try:
        context = _multiprocessing_context()
        for number in range(workers):
            pool.append(_start_worker(context, reader, first_step + number, workers))
        for step in count(first_step):
            process, pipe = pool[(step - first_step) % workers]
            while not pipe.poll(_POLL_SECONDS):
                if stop.is_set():
                    return
            yield step, _receive_batch(reader, step, process, pipe)
    finally:
        for process, pipe in pool:
            pipe.close()
            process.kill()  # it only reads: there is nothing that it could leave half done
        for process, _ in pool:
            process.join()
            process.close()


def _multiprocessing_context() -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker(
    context: BaseContext, reader: _RankReader, first_step: int, stride: int
) -> tuple[BaseProcess, Connection]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker_loop, args=(sender, reader, first_step, stride), daemon=True)  # type: ignore[attr-defined]
    process.start()
    sender.close()  # so that the worker holds the only other end, and its death ends the pipe
    return process, receiver


def _worker_loop(pipe: Connection, reader: _RankReader, first_step: int, stride: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to the whole group; the loader's owner decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        for step in count(first_step, stride):
            try:
                batch = reader.read(step)
            except Exception as error:
                return pipe.send(f"{error}" if isinstance(error, DataError) else f"{type(error).__name__}: {error}")
            # As arrays: tensors would travel through shared memory, whose files outlive a killed process.
            pipe.send([part.numpy() for part in batch.tensors])
    except (BrokenPipeError, ConnectionResetError):
        return None  # the loader is gone


def _receive_batch(reader: _RankReader, step: int, process: BaseProcess, pipe: Connection) -> Samples:
    try:
        parts = pipe.recv()
    except (EOFError, OSError):
        _raise_worker_died(reader, step, process)
    if isinstance(parts, str):
        raise DataError(f"a data worker failed at step {step}: {parts}")
    return Samples(*(torch.from_numpy(part) for part in parts))


def _raise_worker_died(reader: _RankReader, step: int, process: BaseProcess) -> NoReturn:
    process.join()
    code = process.exitcode or 0
    indices = reader.stream.indices(reader.positions(step)).tolist()
    listed = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    if code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        remedy = "Lack of memory does that, and a file that is cut short while it is read; use fewer data.workers."
    else:
        cause = f"ended with exit code {code}"
        remedy = "Its own words are above; a script that starts workers must do so below `if __name__ == '__main__':`."
    raise DataError(f"the data worker that read step {step} (samples {listed}) {cause}. {remedy}") from None
