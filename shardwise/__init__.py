"""Shardwise: train PyTorch models in any layout, verified against a single process.

The public names for use from Python. `step` and `verify` are also names of modules, so they are imported by their full
names, `shardwise.step.step` and `shardwise.verify.parity.verify`:

    job = load_job(Path("job.toml"))
    engine = parallelize(prepare(job, Layout.parse("shard=2")), torch.device("cpu"))  # on each rank
    result = step(engine, engine.make_optimizer(job), samples, clip=1.0)
    records = verify(job, [Layout.parse("pipeline=2 tensor=2")])

Names are imported on first use, so that the command line reports a typo without importing PyTorch."""

import atexit
import gc
import sys
from importlib import import_module
from typing import Any

__version__ = "0.2.1"

_PUBLIC_NAMES = {"Callback": "shardwise.adapters.task", "Engine": "shardwise.parallel.engine",
                 "Family": "shardwise.models.family", "Job": "shardwise.job", "Layout": "shardwise.layout",
                 "ModelConfig": "shardwise.models.config", "Prepared": "shardwise.parallel.prepare",
                 "Samples": "shardwise.data.sample_stream", "ShardwiseError": "shardwise.errors",
                 "StepResult": "shardwise.step", "Task": "shardwise.adapters.task", "Trainer": "shardwise.trainer",
                 "UserError": "shardwise.errors", "VerifyResult": "shardwise.verify.parity",
                 "attention": "shardwise.adapters.split_attention", "load_job": "shardwise.job",
                 "parallelize": "shardwise.parallel.parallelize", "positions": "shardwise.adapters.split_attention",
                 "prepare": "shardwise.parallel.prepare"}  # fmt: skip
__all__ = [*_PUBLIC_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(quick_import(_PUBLIC_NAMES[name]), name)


def quick_import(name: str) -> Any:
    """Imports a module without garbage collection: PyTorch creates a million objects, and all of them stay."""
    is_paused = gc.isenabled() and name not in sys.modules
    if is_paused:
        gc.disable()
    try:
        return import_module(name)
    finally:
        if is_paused:
            gc.freeze()
            gc.enable()


@atexit.register
def _thaw_for_triton() -> None:
    """Gives frozen objects back to the garbage collector if Triton is loaded. Triton 3.9, which comes with PyTorch
    2.15, writes twenty lines of "leaked" objects if those outlive the interpreter. Without Triton they may outlive it:
    the process ends half a second earlier."""
    if "triton" in sys.modules:
        gc.unfreeze()
