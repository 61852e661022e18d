"""Shardwise: train PyTorch models in any layout, proven equal to one device.

The public names, for use from Python, beside the functions `shardwise.step.step` and `shardwise.verify.parity.verify`
(which are rooms of the house too, so they keep their full names):

    job = load_job(Path("job.toml"))
    engine = parallelize(prepare(job, Layout.parse("shard=2")), torch.device("cpu"))  # in each process of the world
    result = step(engine, engine.make_optimizer(job), samples, clip=1.0)
    records = verify(job, [Layout.parse("pipeline=2 tensor=2")])

They are imported on first use, so that the command line can tell a typo without waiting for PyTorch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "Engine": "shardwise.parallel.engine",
    "Family": "shardwise.models.family",
    "Job": "shardwise.job",
    "Layout": "shardwise.layout",
    "ModelConfig": "shardwise.models.config",
    "Prepared": "shardwise.parallel.prepare",
    "Samples": "shardwise.data.sample_stream",
    "ShardwiseError": "shardwise.errors",
    "StepResult": "shardwise.step",
    "UserError": "shardwise.errors",
    "VerifyResult": "shardwise.verify.parity",
    "load_job": "shardwise.job",
    "parallelize": "shardwise.parallel.parallelize",
    "prepare": "shardwise.parallel.prepare",
}
__all__ = [*_PUBLIC_NAMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC_NAMES[name]), name)
