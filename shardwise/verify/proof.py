"""The proof before the first step: a model that is not ours is compared with one process before it is trained.

In float64, on a small copy of the model and with two ranks on every axis that the layout uses, two steps must equal
those of the unmodified module. A proof is cached by what it depends on: the model's source, its plan, the layout
and the versions of PyTorch and Shardwise.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

import shardwise
from shardwise.data.make_sources import default_cache_folder
from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import Job
from shardwise.layout import AXES, Layout
from shardwise.parallel.prepare import Prepared, meta_model
from shardwise.verify.command import shrink_batch, shrink_model
from shardwise.verify.parity import verify

MAX_PARAMETERS = 100_000_000  # of the model that is compared, in float64 on every rank


def prove(prepared: Prepared, say: Callable[[str], None]) -> None:
    """Proves the layout of a model that is not ours; raises JobError if it computes something else."""
    if prepared.family.task(prepared.job.model) is None or prepared.layout.world == 1:
        return
    layout = small_layout(prepared.layout)
    job = shrink_model(prepared.job).model_copy(update={"precision": "float64", "compile": False})
    job = shrink_batch(job, [layout])
    path = default_cache_folder() / "proofs" / f"{_fingerprint(prepared, job, layout)}.json"
    if path.exists():
        say(f"proof:  layout '{layout}' equals one process (cached)")
        return
    size = sum(weight.numel() for weight in meta_model(job.model, job.seed).parameters())
    if size > MAX_PARAMETERS:
        say(f"proof:  none: even its small copy has {size:,} parameters; verify a smaller model of this kind")
        return
    (result,) = verify(job, [layout], steps=2)
    if not result.ok:
        raise JobError(
            f"{result.describe()} The run was not started, because it would not train the model that was given. Check "
            "the plan and the module named, use another layout, or skip this proof (--no-proof, fit(proof=False))."
        )
    say(f"proof:  layout '{layout}' equals one process: gradients to {result.grad:.0e}, weights to {result.weight:.0e}")
    with suppress(OSError):  # it is proven again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result.as_dict()))


def small_layout(layout: Layout) -> Layout:
    """Returns the layout with two ranks on every axis that it uses."""
    degrees = {axis: min(2, getattr(layout, axis)) for axis in (*AXES, "expert")}
    micro_batch = min(layout.micro_batch, 2) if layout.micro_batch else layout.micro_batch
    return replace(layout, **degrees, micro_batch=micro_batch)


def _fingerprint(prepared: Prepared, job: Job, layout: Layout) -> str:
    root: torch.nn.Module = getattr(prepared.model, "root", prepared.model)
    files = set()
    task = prepared.family.task(prepared.job.model)
    functions = [getattr(task, name) for name in ("loss", "count", "collate", "inputs")]
    for code in (*map(type, root.modules()), *(f if inspect.isfunction(f) else type(f) for f in functions)):
        with suppress(TypeError, OSError):  # built in, or defined by exec
            files.add(inspect.getfile(code))
    sources = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files) if os.path.isfile(file)]
    versions = (shardwise.__version__, torch.__version__)
    parts = (sources, repr(prepared.sharding_plan), str(layout), job.model.model_dump_json(), versions)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
