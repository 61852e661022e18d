"""Runs a function in several local processes, forked from this one, so torch is already imported.

For short runs: verify, calibration and tests. Training starts its workers under a supervisor
(`shardwise.workers.supervisor`). If a worker fails, the others are killed. The error raised is that of the worker that
failed first (by timestamp), not a follow-up error of its peers."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise.comm import host_staged
from shardwise.comm.collectives import forbid_pickles, leave_world
from shardwise.errors import RunError, ShardwiseError, WorkerError


def interface_environment(host: str) -> dict[str, str]:
    """Returns settings for gloo, on loopback for NCCL too, to listen on this interface only, unless the user did."""
    address = socket.gethostbyname(host)
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"][: 2 if address.startswith("127.") else 1]
    interfaces = [name for name, found in psutil.net_if_addrs().items() if address in [one.address for one in found]]
    return {name: interfaces[0] for name in names if interfaces and name not in os.environ}


def run_world(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240.0, backend: str = "gloo",
              is_fresh_process: bool = False) -> list[Any]:  # fmt: skip
    """Runs `function(*args)` in `world_size` processes of one process group. Returns their results by rank.
    `is_fresh_process`: this process has computed nothing yet, so oneDNN has started no threads. Otherwise children run
    without oneDNN: on ARM, its matmuls would wait forever for its thread pool, which a fork does not copy."""
    if torch.cuda.is_initialized():
        raise RunError("this process has used CUDA, which does not survive a fork; call run_world before that.")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder, options = Path(name), (backend, is_fresh_process)
        sys.stdout.flush()
        sys.stderr.flush()
        worker_args = [(function, args, rank, world_size, folder, *options) for rank in range(world_size)]
        workers = [context.Process(target=_worker_main, args=rank_args, daemon=True) for rank_args in worker_args]
        for worker in workers:
            worker.start()
        try:
            return _collect_results(workers, timeout, folder)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()


def _worker_main(function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, folder: Path,
                 backend: str, is_fresh_process: bool) -> None:  # fmt: skip
    faulthandler.register(signal.SIGUSR1, (folder / f"stack{rank}").open("w"))  # noqa: SIM115
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(is_fresh_process)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these worlds run on the CPU, and CUDA does not survive a fork
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the compiler's worker processes do not survive it either
    os.environ.update(interface_environment("127.0.0.1"))
    forbid_pickles()
    try:
        if world_size > 1:
            store = dist.FileStore(str(folder / "store"), world_size)
            host_staged.register_backend()
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        result = function(*args)
        leave_world()
        message = (True, time.time_ns(), result)
    except BaseException as error:  # noqa: BLE001 - every failure is reported to the parent
        message = (False, time.time_ns(), _reported_error(error, rank))
    (folder / f"result{rank}").write_bytes(pickle.dumps(message))
    sys.stdout.flush()
    os._exit(0)  # a failed rank leaves without its peers: one may have died, and waiting for it would hang


def _reported_error(error: BaseException, rank: int) -> ShardwiseError:
    """Returns an error that the parent can raise: what was raised on purpose, or the traceback of anything else."""
    if isinstance(error, ShardwiseError):
        return error

    # PyTorch's pipeline, for one, raises "[Stage 0] failed to run forward:" from what really happened.
    first = error
    while first.__cause__ is not None:
        first = first.__cause__

    # The first line says what went wrong. Advice may follow: PyTorch's ends with "workaround examples".
    lines = str(first).strip().splitlines()
    kind = type(first).__name__
    cause = f"rank {rank}: {kind}: {lines[0].strip()}" if lines else f"rank {rank}: {kind}"
    return WorkerError(f"rank {rank}: {traceback.format_exc()}", cause)


def _collect_results(workers: list[Any], timeout: float, folder: Path) -> list[Any]:
    outcomes: dict[int, tuple[bool, int, Any]] = {}  # by rank: whether it succeeded, when it ended, result or error
    deadline = time.monotonic() + timeout
    pending = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    while pending:
        # After a failure, give the others a moment to report that they failed earlier.
        has_failed = not all(succeeded for succeeded, _, _ in outcomes.values())
        ready = wait(list(pending), timeout=0.5 if has_failed else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [pending.pop(sentinel) for sentinel in ready]:  # type: ignore[call-overload]
            try:
                outcomes[rank] = pickle.loads((folder / f"result{rank}").read_bytes())
            except (FileNotFoundError, EOFError, pickle.UnpicklingError):  # it was killed
                workers[rank].join()  # for its exit code
                outcomes[rank] = False, time.time_ns(), f"rank {rank} exited with code {workers[rank].exitcode}"
    if failures := [outcome for outcome in outcomes.values() if not outcome[0]]:
        payload = min(failures, key=lambda outcome: outcome[1])[2]
        raise payload if isinstance(payload, ShardwiseError) else RunError(str(payload))
    if pending:
        unfinished = sorted(pending.values())
        for rank in unfinished:
            os.kill(workers[rank].pid, signal.SIGUSR1)  # it dumps its stack
        time.sleep(0.3)
        stacks = "\n".join(f"rank {rank}:\n{(folder / f'stack{rank}').read_text()}" for rank in unfinished)
        raise RunError(f"ranks {unfinished} did not finish within {timeout:.0f} s.\n{stacks}")
    return [outcomes[rank][2] for rank in range(len(workers))]
