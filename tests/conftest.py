"""What all tests share.

Worlds of processes are forked per case by `shardwise.comm.world.run_world`. A pool of workers that lives for the whole
run was measured and not built: starting a world costs 0.05 s (2 processes) to 0.25 s (8) of the 0.6 to 4 s that a case
takes, the rest is the work itself on the cores that there are; a second case in the same world ran 4 to 7% faster.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from shardwise.workers.fork_server import ForkServer

gc.disable()  # until all is imported
# A process that forks must not have threads that hold locks: no torch operation here may start any.
torch.set_num_threads(1)

# The same examples in every run, and no verdict by time.
settings.register_profile("shardwise", derandomize=True, deadline=None)
settings.load_profile("shardwise")

pytest_plugins = ["suite.selection", "suite.report", "suite.warm", "suite.profile", "suite.mutation_testing"]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks workers with planted faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        server = ForkServer("planted_faults")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh_models() -> None:
    """A test may patch a model: none is handed on from the test before."""
    from shardwise.parallel.prepare import forward_flops, meta_model, split_shapes

    meta_model.cache_clear()
    forward_flops.cache_clear()
    split_shapes.cache_clear()
