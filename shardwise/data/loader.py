"""Loads the batches of one data-parallel rank and prefetches them while the device computes.

A thread prefetches `prefetch` batches. It reads them itself, which is enough for tokens (a memory map and a copy), or
receives them from worker processes, for expensive samples. Worker w of n reads steps first_step + w,
first_step + w + n, ...; the thread polls workers round-robin, so batches arrive in step order. Besides the skipped
batches, the only state is the number of the next step, so resuming starts there.

PyTorch's DataLoader is not used: resuming needs its sampler's state, and it reports only the process id of a worker
that dies. Workers come from multiprocessing's fork server (safe with threads and CUDA, one torch import), and exit when
the loader is closed or garbage-collected, and when its process is killed: their pipe closes."""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from shardwise.console import name_process
from shardwise.data.sample_stream import Samples, SampleStream, rank_positions
from shardwise.errors import DataError

SkippedBatches = Sequence[tuple[int, int]]  # (step, count): from this step on, the stream jumps over so many batches
BatchIterator = Generator[tuple[int, Samples], None, None]
_CPU = torch.device("cpu")
_THREAD_NAME = "shardwise-data"
_POLL_SECONDS = 0.1  # between checks of the stop flag while waiting for a worker; batches are received at once


@dataclass(frozen=True)
class _RankReader:
    """Reads one data-parallel rank's share of each global batch."""

    stream: SampleStream
    batch_size: int
    ranks: int
    rank: int
    skipped_batches: SkippedBatches = ()

    def positions(self, step: int) -> np.ndarray:
        step += sum(count for from_step, count in self.skipped_batches if from_step <= step)
        return rank_positions(step, self.batch_size, self.ranks, self.rank)

    def read(self, step: int) -> Samples:
        return self.stream.read(self.positions(step))


class Loader:
    """Endless iterator over (step, batch) from `first_step` on."""

    def __init__(self, stream: SampleStream, global_batch_size: int, ranks: int = 1, rank: int = 0, first_step: int = 0,
                 workers: int = 0, prefetch: int = 2, device: torch.device = _CPU,
                 skipped_batches: SkippedBatches = ()):  # fmt: skip
        """`global_batch_size` counts the samples of all `ranks`. Batches for a CUDA device are in pinned memory."""
        assert global_batch_size % ranks == 0, "`solve_batch` refuses such a layout"
        self.wait_seconds = 0.0  # total time that the consumer has waited for batches
        reader = _RankReader(stream, global_batch_size, ranks, rank, skipped_batches)
        stop = threading.Event()
        batches: BatchIterator = ((step, reader.read(step)) for step in count(first_step))
        if workers:
            batches = _read_in_workers(reader, first_step, workers, stop)
        executor = ThreadPoolExecutor(1, _THREAD_NAME)
        # The thread must not reference the loader, or one dropped without close() would never be garbage-collected.
        self._prefetch_one = partial(executor.submit, _next_batch, batches, device)
        self._prefetched = deque(self._prefetch_one() for _ in range(prefetch))
        self._finalizer = weakref.finalize(self, _stop_prefetching, executor, stop, batches)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[int, Samples]:
        if not self._prefetched:
            raise StopIteration
        start = time.perf_counter()
        try:
            item = self._prefetched[0].result()
        except Exception:
            self._finalizer()  # the next call raises the same error
            raise
        self.wait_seconds += time.perf_counter() - start
        self._prefetched.popleft()
        self._prefetched.append(self._prefetch_one())
        return item

    def close(self) -> None:
        """Stops the thread and the workers; safe to call twice."""
        self._finalizer()
        self._prefetched.clear()


def _next_batch(batches: BatchIterator, device: torch.device) -> tuple[int, Samples]:
    step, batch = next(batches)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # per thread; otherwise pinning would create a context on device 0
        batch = Samples.from_tensors(part.pin_memory() for part in batch.tensors)
    return step, batch


def _stop_prefetching(executor: ThreadPoolExecutor, stop: threading.Event, batches: BatchIterator) -> None:
    stop.set()
    # A loader may be garbage-collected in any thread, including this one, which then ends by itself.
    is_prefetching = threading.current_thread().name.startswith(_THREAD_NAME)
    executor.shutdown(wait=not is_prefetching, cancel_futures=True)
    if not is_prefetching:
        batches.close()


def _read_in_workers(reader: _RankReader, first_step: int, workers: int, stop: threading.Event) -> BatchIterator:
    pool: list[tuple[BaseProcess, Connection]] = []
    try:
        pool.extend(_start_worker(reader, first_step + number, workers) for number in range(workers))
        for step in count(first_step):
            process, pipe = pool[(step - first_step) % workers]
            while not pipe.poll(_POLL_SECONDS):
                if stop.is_set():
                    return
            yield step, _receive_batch(reader, step, process, pipe)
    finally:
        for process, pipe in pool:
            pipe.close()
            process.kill()  # safe: workers write no files
        for process, _ in pool:
            process.join()
            process.close()


def _start_worker(reader: _RankReader, first: int, stride: int) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker_loop, args=(sender, reader, first, stride), daemon=True)
    process.start()
    sender.close()  # the worker keeps the only write end, so its death closes the pipe
    return process, receiver


def _worker_loop(pipe: Connection, reader: _RankReader, first_step: int, stride: int) -> None:
    # Signals such as Ctrl-C reach the whole process group; the loader's process decides when workers stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name_process(f"shardwise: data loader of {os.getppid()}")
    torch.set_num_threads(1)
    try:
        for step in count(first_step, stride):
            try:
                batch = reader.read(step)
            except Exception as error:
                return pipe.send(f"{error}" if isinstance(error, DataError) else f"{type(error).__name__}: {error}")
            # As numpy arrays: tensors would go through shared memory, whose files outlive a killed process.
            pipe.send([part.numpy() for part in batch.tensors])
    except (BrokenPipeError, ConnectionResetError):
        return None  # the loader is gone


def _receive_batch(reader: _RankReader, step: int, process: BaseProcess, pipe: Connection) -> Samples:
    with suppress(EOFError, OSError):
        parts = pipe.recv()
        if isinstance(parts, str):
            raise DataError(f"a data worker failed at step {step}: {parts}")
        return Samples.from_tensors(torch.from_numpy(part) for part in parts)
    process.join()
    code = process.exitcode or 0
    indices = reader.stream.indices(reader.positions(step)).tolist()
    listed = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    if code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        remedy = "Usual causes: out of memory (use fewer data.workers), or a file truncated while it was read."
    else:
        cause = f"ended with exit code {code}"
        remedy = "See its output above; a script that uses data.workers needs an `if __name__ == '__main__':` guard."
    raise DataError(f"the data worker that read step {step} (samples {listed}) {cause}. {remedy}")
