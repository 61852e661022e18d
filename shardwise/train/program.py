"""Models that transformers does not know, as a program of `torch.export`: one file, which needs PyTorch alone.

    program = torch.export.load("model.pt2").module()
    logits = program(images)              # ResNet: (B, 3, size, size)
    logits = program(tokens)              # BERT: (B, S); T5: encoder and decoder tokens, one after the other
    logits = program(numbers, ids, weights)  # DLRM: (B, features), (B, tables, lookups) with -1 for none, their weights

The number of samples is free. `reference.safetensors` holds inputs and what the run's model makes of them.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.data.criteo import ClickBatch
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import job_stream
from shardwise.errors import JobError, RunError
from shardwise.job import Job

PROGRAM, REFERENCE = "model.pt2", "reference.safetensors"
TOLERANCE = 1e-5  # relative; in another process, kernels may sum in another order


class Whole(nn.Module):
    """A chain that returns logits."""

    def __init__(self, chain: nn.Module):
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.chain(x)
        return logits.squeeze(1)  # images have one position


class ClickModel(nn.Module):
    """A DLRM with its embedding tables."""

    def __init__(self, dense: nn.Module, tables: list[Tensor]):
        super().__init__()
        self.dense, self.tables = dense, nn.ParameterList(tables)

    def forward(self, numbers: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        weights = weights * (ids >= 0)
        looked_up = [F.embedding(ids[:, n].clamp(min=0), table) for n, table in enumerate(self.tables)]
        vectors = [(rows * weights[:, n].unsqueeze(2)).sum(1) for n, rows in enumerate(looked_up)]
        return self.dense(numbers, torch.stack(vectors, 1))  # type: ignore[no-any-return]


def deployable(job: Job, model: nn.Module, read: Any, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model with everything that it needs, and two samples for it. `read` reads embedding tables."""
    if job.model.passes_batch:
        raise JobError(
            f"{job.model.description} has no form that transformers knows; only its own checkpoints hold it."
        )
    samples = job_stream(job, synthetic_source(job, 2)).read(np.arange(2))
    if not (tables := job.family.tables(job.model)):
        return Whole(model), (samples.tokens.to(dtype) if samples.tokens.is_floating_point() else samples.tokens,)
    like = {table.name: torch.empty(table.rows, table.width, device="meta") for table in tables}
    batch = ClickBatch.unpack(samples, job.model)  # type: ignore[arg-type]
    inputs = (batch.dense_features.to(dtype), batch.sparse_ids, batch.weights.to(dtype))
    return ClickModel(model, [weight.to(dtype) for weight in read(like).values()]), inputs


def write_program(folder: Path, model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Writes the program and its reference; returns the bytes of the program."""
    model = model.eval().requires_grad_(False)
    expected, batch = model(*inputs), torch.export.Dim("batch", min=1)
    program = torch.export.export(model, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs)))
    torch.export.save(program, folder / PROGRAM)
    tensors = {f"input_{number}": tensor.contiguous() for number, tensor in enumerate(inputs)}
    save_file({**tensors, "output": expected.contiguous()}, folder / REFERENCE)
    return (folder / PROGRAM).stat().st_size


def check_program(folder: Path) -> str:
    """Raises RunError unless a fresh process gets from the program what the run's model gave, for any batch."""
    done = subprocess.run([sys.executable, "-m", __name__, str(folder)], capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RunError(f"a fresh process does not get the reference from the program: {done.stderr.strip()[-500:]}")
    return f"checked: a fresh process loads {PROGRAM}, and its logits differ from the run's by {done.stdout.strip()}."


def compare(folder: Path) -> float:
    """Returns by how much the program's results differ from the reference; the samples together and one by one."""
    program, tensors = torch.export.load(folder / PROGRAM).module(), load_file(folder / REFERENCE)
    expected = tensors.pop("output")
    inputs = [tensors[f"input_{number}"] for number in range(len(tensors))]
    found = [program(*inputs), torch.cat([program(*(x[n : n + 1] for x in inputs)) for n in range(len(expected))])]
    return max(float((one - expected).norm() / expected.norm()) for one in found)


if __name__ == "__main__":
    error = compare(Path(sys.argv[1]))
    print(f"{error:.1e}")
    sys.exit(0 if error <= TOLERANCE else f"its logits differ by {error:.1e}.")
