"""One axis of the process mesh as this rank sees it, the step timer, timed collectives, and exchanges of small values.

The names of collectives are the same for every supported PyTorch version (2.13 renamed some). Except in asynchronous
calls and compiled code, the axis's step timer records how long this rank waits in each collective. Functional
collectives live in a private module of PyTorch and are the only ones that compile. Small values are exchanged as JSON
(tuples arrive as lists, keys are texts), not as PyTorch's pickles, which can run code on whoever receives them."""

import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

DEVICE_PHASES = ("compute", "optimizer")  # timed on the GPU; the others on the host
PHASES_INCLUDING_WAITS = ("data", "checkpoint", "validation")  # waits in `waiting` blocks count towards these phases
P2P_CHUNK_BYTES = 1 << 18  # bytes per message of `all_to_all_rows`
Timestamp = Any  # `perf_counter` seconds on a CPU, otherwise a CUDA event
Span = tuple[str, str, Timestamp, Timestamp]  # axis (empty unless it is a wait), phase, begin and end


class StepTimer:
    """Seconds per phase, seconds of waiting per mesh axis, bytes sent and pipeline actions of this rank's current step.
    No interval is counted twice: a wait is subtracted from the phase around it, except in PHASES_INCLUDING_WAITS, whose
    waits are not timed, and nested `waiting` blocks are counted once. On a CPU the host's clock is used. On a GPU,
    device phases and waits are spans between CUDA events in the compute stream, read after they have completed, so
    timing never synchronizes; where a CUDA graph is replayed, they are its nodes. The engine's mesh owns the timer."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.enabled = True
        self.device = device or torch.device("cpu")
        self.bytes_sent: Counter[str] = Counter()  # bytes sent, by axis
        self.wait_seconds: defaultdict[str, float] = defaultdict(float)  # seconds of waiting, by axis
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)  # seconds by phase, without waits
        self._pending_spans: list[Span] = []
        self._captured_spans: list[Span] | None = None
        self._replayed_spans: tuple[list[Span], Timestamp] | None = None
        self._phase, self._phase_start, self._phase_is_on_device = "", time.perf_counter(), False
        self._wait_start: Timestamp = None
        self._actions: list[tuple[str, int, int, Timestamp, Timestamp]] | None = None
        self._wait_depth = 0
        self._thread: int | None = None

    def begin_step(self) -> None:
        """Resets the times and starts a step. On a CPU, only waits of the calling thread are timed from now on."""
        self.begin_phase("")
        self._thread = threading.get_ident()
        self._collect_finished_spans()
        self.wait_seconds.clear()
        self.phase_seconds.clear()

    def begin_phase(self, name: str, overlapped: bool = False) -> None:
        """Ends the current phase and begins another; an empty name only ends the current one. `overlapped`: the GPU is
        still computing, and only the time that it then waits for this phase counts."""
        if self._phase and self.enabled:
            end = self._timestamp() if self._phase_is_on_device else time.perf_counter()
            self._add_span("", self._phase, self._phase_start, end)
        self._phase, self._phase_is_on_device = name, overlapped or name in DEVICE_PHASES
        self._phase_start = self._timestamp() if self._phase_is_on_device else time.perf_counter()

    def begin_capture(self) -> None:
        """Begins the capture of a step, in the compute phase. Its spans go to `end_capture`."""
        self._captured_spans = []
        self._phase, self._phase_is_on_device, self._phase_start = "compute", True, self._timestamp()

    def end_capture(self) -> list[Span]:
        """Ends a capture; returns its spans for `add_replay`."""
        self.begin_phase("")
        spans, self._captured_spans = self._captured_spans, None
        return spans or []

    def cancel_capture(self) -> None:
        """Forgets a capture that failed."""
        self._captured_spans, self._phase = None, ""

    def add_replay(self, spans: list[Span]) -> None:
        """Counts the spans of the graph that was just launched. The next replay overwrites their times."""
        self._replayed_spans = spans, self._timestamp()

    @contextmanager
    def waiting(self, axis: str, device: torch.device | None = None) -> Iterator[None]:
        """Times the block it wraps as a wait for the other ranks of an axis."""
        device = device or self.device
        is_other_thread = device.type == "cpu" and self._thread not in (None, threading.get_ident())
        if not self.enabled or self._wait_depth or is_other_thread or self._phase in PHASES_INCLUDING_WAITS:
            yield
            return
        self._wait_depth += 1
        begin = self._timestamp(device)
        try:
            yield
        finally:
            self._wait_depth -= 1
            self._add_span(axis, self._phase, begin, self._timestamp(device))

    def begin_wait(self) -> None:
        """Starts a wait that `end_wait` ends. Calling it again before `end_wait` restarts the wait."""
        self._wait_start = self._timestamp() if self.enabled else None

    def end_wait(self, axis: str) -> None:
        if self._wait_start is not None:
            self._add_span(axis, self._phase, self._wait_start, self._timestamp())
            self._wait_start = None

    def start_recording(self) -> None:
        """Records pipeline actions until `take_recorded_actions`."""
        self._actions, self._recording_start = [], (self._timestamp(), time.time())

    @contextmanager
    def record_action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        if self._actions is None:
            yield
            return
        begin = self._timestamp()
        yield
        self._actions.append((kind, stage, micro_batch, begin, self._timestamp()))

    def take_recorded_actions(self) -> list[tuple[str, int, int, float, float]]:
        """Returns (kind, stage, micro-batch, begin, end) per action, in Unix time. The GPU must have finished them."""
        actions, self._actions = self._actions, None
        if not actions:
            return []
        start_timestamp, start_unix_time = self._recording_start

        def to_unix_time(timestamp: Timestamp) -> float:
            if isinstance(start_timestamp, float):
                return float(start_unix_time + timestamp - start_timestamp)
            return float(start_unix_time + start_timestamp.elapsed_time(timestamp) / 1e3)

        return [(*action, to_unix_time(start), to_unix_time(end)) for *action, start, end in actions]  # type: ignore[misc]

    def _timestamp(self, device: torch.device | None = None) -> Timestamp:
        if (device or self.device).type != "cuda":
            return time.perf_counter()
        # An external event is recorded by each replay of the graph.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def _add_span(self, axis: str, phase: str, begin: Timestamp, end: Timestamp) -> None:
        if isinstance(begin, float) and isinstance(end, float):
            self._accumulate(axis, phase, end - begin)
        else:
            spans = self._pending_spans if self._captured_spans is None else self._captured_spans
            spans.append((axis, phase, begin, end))

    def _accumulate(self, axis: str, phase: str, seconds: float) -> None:
        if axis:
            self.wait_seconds[axis] += seconds
        if phase:
            self.phase_seconds[phase] += -seconds if axis else seconds

    def _collect_finished_spans(self) -> None:
        """Accumulates the spans whose end event has completed; the others stay pending."""
        still_pending = []
        for axis, phase, begin, end in self._pending_spans:
            if end.query():
                self._accumulate(axis, phase, begin.elapsed_time(end) / 1e3)
            else:
                still_pending.append((axis, phase, begin, end))
        self._pending_spans = still_pending
        if self._replayed_spans is not None and self._replayed_spans[1].query():
            for axis, phase, begin, end in self._replayed_spans[0]:
                self._accumulate(axis, phase, begin.elapsed_time(end) / 1e3)
            self._replayed_spans = None

    def elapsed(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns seconds by phase and axis since the step began; late CUDA events count in a later step."""
        self._collect_finished_spans()
        return dict(self.phase_seconds), dict(self.wait_seconds)


@dataclass(frozen=True)
class Axis:
    """Size, this rank's index, and the process group. An axis of size 1 has no group and skips its collectives."""

    size: int
    index: int
    group: dist.ProcessGroup | None
    name: str = field(default="world", compare=False)  # the name under which the step timer records waits for this axis
    timer: StepTimer | None = field(default=None, compare=False, repr=False)  # None: waits are not timed

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "an axis has a process group if and only if its size exceeds 1"

    def span(self, total: int) -> tuple[int, int]:
        """Returns start and length of this rank's chunk when `torch.chunk` splits `total` rows over the axis."""
        size = -(-total // self.size)
        first = min(self.index * size, total)
        return first, min(size, total - first)

    def waiting(self, device: torch.device) -> AbstractContextManager[None]:
        """Times the block it wraps as a wait for the other ranks of this axis."""
        return nullcontext() if self.timer is None else self.timer.waiting(self.name, device)


SINGLE_RANK = Axis(1, 0, None)


def _first_available(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


functional_all_gather = _first_available(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = _first_available(functional, "reduce_scatter_single", "reduce_scatter_tensor")


def _timed(collective: Any) -> Any:
    def timed_collective(tensor: Tensor, *args: Any, axis: Axis, async_op: bool = False) -> Any:
        if axis.size == 1:  # a sum is there already; any other output is the input
            return tensor.copy_(args[0]) if args and isinstance(args[0], Tensor) else None
        if async_op or torch.compiler.is_compiling():
            return collective(tensor, *args, group=axis.group, async_op=async_op)
        with axis.waiting(tensor.device):
            return collective(tensor, *args, group=axis.group)

    return timed_collective


all_reduce = _timed(dist.all_reduce)
all_gather = _timed(_first_available(dist, "all_gather_single", "all_gather_into_tensor"))
reduce_scatter = _timed(_first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor"))
all_to_all = _timed(dist.all_to_all_single)


def all_reduce_coalesced(tensors: Sequence[Tensor], axis: Axis) -> None:
    """All-reduces several tensors in place, in one collective."""
    if tensors and axis.size > 1:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        all_reduce(flat, axis=axis)
        for tensor, chunk in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(chunk.view(tensor.shape))


def all_to_all_rows(output: Tensor, input: Tensor, axis: Axis) -> None:
    """Sends row i of `input` to rank i and receives row i of `output` from it; both are uint8 (ranks, bytes). On CPUs,
    rows are sent in chunks: gloo reaches half its bandwidth when long messages share a slow link both ways."""
    if input.device.type != "cpu":
        all_to_all(output, input.contiguous(), axis=axis)
        return
    ranks, rank, group = axis.size, axis.index, axis.group
    output[rank] = input[rank]
    in_flight: list[tuple[Any, Any]] = []
    with axis.waiting(input.device):
        for offset in range(1, ranks):  # with at most two chunks in flight in each direction
            dst, src = (rank + offset) % ranks, (rank - offset) % ranks
            for first in range(0, input.shape[1], P2P_CHUNK_BYTES):
                chunk = slice(first, first + P2P_CHUNK_BYTES)
                send = dist.isend(input[dst, chunk], group=group, group_dst=dst)
                in_flight.append((send, dist.irecv(output[src, chunk], group=group, group_src=src)))
                for work in in_flight.pop(0) if len(in_flight) > 1 else ():
                    work.wait()
        for work in in_flight.pop() if in_flight else ():
            work.wait()


# Collectives with a gradient. All-gather and reduce-scatter are each other's backward; all-to-all is its own, with the
# split sizes swapped. In compiled code, `axis` of the first two is None: the compiler decides where to wait, untimed.


def _gather_or_scatter(x: Tensor, dim: int, group: Any, axis: Axis | None, scatters: bool) -> Tensor:
    """Runs a functional all-gather or, if `scatters`, reduce-scatter, and waits for it; on a GPU only the stream waits.
    With gloo, an all-gather is given its output: without, it is the coalesced one, whose overlapping calls corrupt
    memory (pytorch/pytorch#65231), and the late end of one can overlap with the next although both are waited for."""
    collective = functional_reduce_scatter if scatters else functional_all_gather
    args = (x, "sum", dim, group) if scatters else (x, dim, group)
    if axis is None:
        return collective(*args)  # type: ignore[no-any-return]
    with axis.waiting(x.device):
        if scatters or dist.get_backend(group) != "gloo":
            return functional.wait_tensor(collective(*args))  # type: ignore[no-any-return]
        output = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
        gather = torch.ops._c10d_functional.all_gather_into_tensor_out
        rows = functional.wait_tensor(gather(x, axis.size, group.group_name, out=output))
        return rows if dim == 0 else torch.cat(rows.chunk(axis.size), dim)


class _GatherOrScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, axis: Axis | None, scatters: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.axis, ctx.scatters = dim, group, axis, scatters
        return _gather_or_scatter(x, dim, group, axis, scatters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = _gather_or_scatter(grads[0].contiguous(), ctx.dim, ctx.group, ctx.axis, not ctx.scatters)
        return grad, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
        ctx.received, ctx.sent, ctx.axis = received, sent, axis
        return _exchange_rows(x, received, sent, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grads[0].contiguous(), ctx.sent, ctx.received, ctx.axis), None, None, None


def _exchange_rows(x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    if axis.timer is not None:
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        axis.timer.bytes_sent[axis.name] += (sum(sent) - sent[axis.index]) * row_bytes
    all_to_all(output, x, received, sent, axis=axis)
    return output


def all_gather_with_grad(x: Tensor, dim: int, axis: Axis) -> Tensor:
    timed_axis = None if torch.compiler.is_compiling() else axis
    return _GatherOrScatter.apply(x, dim, axis.group, timed_axis, False)  # type: ignore[no-any-return]


def reduce_scatter_with_grad(x: Tensor, dim: int, axis: Axis) -> Tensor:
    timed_axis = None if torch.compiler.is_compiling() else axis
    return _GatherOrScatter.apply(x, dim, axis.group, timed_axis, True)  # type: ignore[no-any-return]


def all_to_all_with_grad(x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    """Sends `sent[i]` rows to rank i and receives `received[i]` from it; counts the bytes sent."""
    return _AllToAll.apply(x, received, sent, axis)  # type: ignore[no-any-return]


def ping_pong(tensor: Tensor, first: int, second: int, group: dist.ProcessGroup | None = None) -> None:
    """Sends a tensor from one rank to another and back; other ranks do nothing."""
    if dist.get_rank() in (first, second):
        is_first = dist.get_rank() == first
        for transfer in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
            transfer(tensor, second if is_first else first, group)


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [json.loads(json.dumps(value))]
    encoded = _encode(value, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    padded = torch.nn.functional.pad(encoded, (0, int(max(sizes)) - len(encoded)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns the value of the group's first rank, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return json.loads(json.dumps(value))
    encoded = _encode(value if dist.get_rank(group) == 0 else None, group)
    size = torch.tensor([len(encoded)], device=encoded.device)
    dist.broadcast(size, group=group, group_src=0)
    encoded = encoded if dist.get_rank(group) == 0 else encoded.new_empty(int(size))
    dist.broadcast(encoded, group=group, group_src=0)
    return _decode(encoded)


def leave_world() -> None:
    """Leaves the process group once everything that any rank has queued has arrived; every rank must call it.

    NCCL only queues a collective: a rank that exits before its part has been sent leaves its peers waiting for it, so
    each first waits for its own device. Gloo blocks in each call, but a peer may still be opening connections."""
    if not dist.is_initialized():
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()  # NCCL sends what its threads still hold before it closes a connection


def forbid_pickles() -> None:
    """Makes PyTorch's object collectives fail in this process instead of unpickling what other ranks send."""

    def refuse(*args: Any) -> Any:
        raise RuntimeError("collectives of Python objects are disabled: they would unpickle what other ranks send.")

    dist.distributed_c10d._tensor_to_object = refuse


def _encode(value: Any, group: dist.ProcessGroup | None) -> Tensor:
    device = "cuda" if dist.get_backend(group) != "gloo" and torch.cuda.is_available() else "cpu"
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)


def _decode(encoded: Tensor) -> Any:
    return json.loads(bytes(encoded.cpu().numpy()))
