"""Worlds of processes on this machine, forked from one that has torch imported already.

For verify and the tests, where a world lives for seconds. Training starts its workers under a supervisor
(`shardwise.guard.supervise`). A worker that fails ends the world at once; the error that is raised is that of the
worker that failed first, by its own clock, not of those that lost a neighbour because of it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import staged
from shardwise.errors import RunError, ShardwiseError


def run_world(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 240.0, backend: str = "gloo",
    fresh: bool = False,
) -> list[Any]:  # fmt: skip
    """Runs `function(*args)` in `size` processes that form one world; returns what each gave, by rank. `fresh`: this
    process has computed nothing yet, so oneDNN has no threads in it; on ARM its products wait for ever for those that a
    fork has left behind, so children of others do without it."""
    if torch.cuda.is_initialized():
        raise RunError("this process has used CUDA, which does not survive a fork: start one of its own for this.")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        workers, ends = [], []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            given = (function, args, rank, size, folder, there, backend, fresh)
            worker = context.Process(target=_work, args=given, daemon=True)
            worker.start()
            there.close()
            workers.append(worker)
            ends.append(here)
        try:
            return _collect(ends, workers, timeout, Path(folder))
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
            for worker in workers:
                worker.join()


def _work(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, folder: str, end: Connection,
    backend: str, fresh: bool,
) -> None:  # fmt: skip
    faulthandler.register(signal.SIGUSR1, open(os.path.join(folder, f"stack{rank}"), "w"))  # noqa: SIM115
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(fresh)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these worlds compute on the CPU, and CUDA does not survive a fork
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # nor does the compiler's pool of processes
    try:
        if size > 1:
            store = dist.FileStore(os.path.join(folder, "store"), size)
            staged.register()
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        result = function(*args)
        if size > 1:
            dist.barrier()  # who leaves early takes the links away from those who are still making them
        answer = (True, time.time_ns(), result)
    except BaseException as error:  # noqa: BLE001 - every way to die is reported to the parent
        known = isinstance(error, ShardwiseError)
        answer = (False, time.time_ns(), error if known else f"rank {rank}: {traceback.format_exc()}")
    end.send_bytes(pickle.dumps(answer))
    end.close()
    # Leave without tearing down process groups: a neighbour may have died, and waiting for it would hang.
    sys.stdout.flush()
    os._exit(0)


def _collect(ends: list[Connection], workers: list[Any], timeout: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[int, int, Any]] = []
    deadline = time.monotonic() + timeout
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        # After a failure the others get a moment to say that they failed earlier.
        limit = 0.5 if failures else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), timeout=limit)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                fine, moment, answer = pickle.loads(end.recv_bytes())
            except EOFError:
                workers[rank].join(1.0)
                fine, moment, answer = False, time.time_ns(), f"rank {rank} ended with code {workers[rank].exitcode}"
            if fine:
                results[rank] = answer
            else:
                failures.append((moment, rank, answer))
    if failures:
        _, rank, answer = min(failures, key=lambda failure: failure[0])
        raise answer if isinstance(answer, ShardwiseError) else RunError(str(answer))
    if waiting:
        late = sorted(waiting.values())
        stacks = "\n".join(f"rank {rank}:\n{_stack(workers[rank].pid, folder / f'stack{rank}')}" for rank in late)
        raise RunError(f"ranks {late} did not finish within {timeout:.0f} s.\n{stacks}")
    return [results[rank] for rank in range(len(ends))]


def _stack(process: int, file: Path) -> str:
    """Where a process is that does not end."""
    os.kill(process, signal.SIGUSR1)
    time.sleep(0.3)
    return file.read_text()
