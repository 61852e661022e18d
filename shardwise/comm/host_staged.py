"""A process-group backend for several processes on one GPU: copies tensors to host memory and uses gloo.

NCCL refuses two ranks of one host on one GPU, and gloo on CUDA tensors supports no send and receive and crashes in some
collectives (PyTorch 2.11). Every collective is synchronous; this is for trying out layouts, not for speed. What NCCL
would refuse is refused here too. A backend in Python needs c10d internals, which here only this and `collectives.py`
touch."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
ProcessGroup: Any = dist.ProcessGroup  # signatures differ between PyTorch versions

BACKEND = "host_staged"
NCCL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
               torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip
BITWISE_OPS = {"BAND": dist.ReduceOp.BAND, "BOR": dist.ReduceOp.BOR, "BXOR": dist.ReduceOp.BXOR}


def register_backend() -> None:
    """Registers the backend with PyTorch, once per process."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, HostStagedBackend, devices=["cpu", "cuda"])


class HostStagedBackend(ProcessGroup):  # type: ignore[misc]
    """Wraps a gloo process group in host copies. Methods carry the names of old and new PyTorch versions."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        host_tensors = [_copy_to_host(tensor, opts) for tensor in tensors]
        self.gloo.allreduce(host_tensors, opts or c10d.AllreduceOptions()).wait()
        return _copy_back(tensors, host_tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        host_tensors = [_copy_to_host(tensor) for tensor in tensors]
        self.gloo.broadcast(host_tensors, opts or c10d.BroadcastOptions()).wait()
        return _copy_back(tensors, host_tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        host_tensors = [[_empty_host_like(tensor) for tensor in row] for row in outputs]
        host_inputs = [_copy_to_host(tensor) for tensor in inputs]
        self.gloo.allgather(host_tensors, host_inputs, opts or c10d.AllgatherOptions()).wait()
        return _copy_back([t for row in outputs for t in row], [t for row in host_tensors for t in row])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(-1).chunk(self.size()))], [input.reshape(-1)])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return [self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        host_input = _copy_to_host(input, opts)
        allreduce_opts = c10d.AllreduceOptions()
        if opts is not None:
            allreduce_opts.reduceOp = opts.reduceOp
        self.gloo.allreduce([host_input], allreduce_opts).wait()
        return _copy_back([output], [host_input.view(self.size(), -1)[self.rank()].view(output.shape)])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def alltoall_base(self, output: Tensor, input: Tensor, received: Any, sent: Any, opts: Any = None) -> Any:
        host_output, opts = _empty_host_like(output), opts or c10d.AllToAllOptions()
        self.gloo.alltoall_base(host_output, _copy_to_host(input), received, sent, opts).wait()
        return _copy_back([output], [host_output])

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")])

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        host_tensors = [_copy_to_host(tensor) for tensor in tensors]
        return HostStagedWork(self.gloo.send(host_tensors, rank, tag), [], host_tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        host_tensors = [_empty_host_like(tensor) for tensor in tensors]
        return HostStagedWork(self.gloo.recv(host_tensors, rank, tag), tensors, host_tensors)

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> "HostStagedBackend":
        """Returns itself. A group in Python has no other backend, and batches of sends and receives ask it for one."""
        return self

    @property
    def supports_coalescing(self) -> bool:
        """False: every send and receive of a batch is an operation of its own, as with gloo."""
        return False

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    allreduce_coalesced = allreduce
    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


class HostStagedWork(dist.Work):
    """A send or receive in flight; `wait` copies what was received to its tensors."""

    def __init__(self, work: Any, tensors: list[Tensor], host_tensors: list[Tensor]):
        super().__init__()
        self.work, self.tensors, self.host_tensors = work, tensors, host_tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        for tensor, host in zip(self.tensors, self.host_tensors):
            tensor.detach().copy_(host)
        self.tensors = []
        return True


def refuse_what_nccl_would(tensor: Tensor, opts: Any = None) -> None:
    """Raises ValueError for tensors and reductions that NCCL does not support."""
    if torch.cuda.is_available() and not tensor.is_cuda:
        raise ValueError("NCCL has no collectives on tensors in host memory.")
    if not tensor.is_contiguous():
        form = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"NCCL needs contiguous tensors, not {form}.")
    if tensor.dtype not in NCCL_DTYPES:
        raise ValueError(f"NCCL does not support {tensor.dtype}.")
    for name, operation in BITWISE_OPS.items():
        if getattr(opts, "reduceOp", None) == operation:
            raise ValueError(f"NCCL has no reduction {name}.")


def _copy_to_host(tensor: Tensor, opts: Any = None) -> Tensor:
    refuse_what_nccl_would(tensor, opts)
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _empty_host_like(tensor: Tensor) -> Tensor:
    refuse_what_nccl_would(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy_back(tensors: list[Tensor], host_tensors: list[Tensor]) -> Any:
    for tensor, host in zip(tensors, host_tensors, strict=True):
        tensor.detach().copy_(host)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return c10d._create_work_from_future(future)
