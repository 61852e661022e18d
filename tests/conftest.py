"""What all tests share.

Worlds of processes are forked per case by `shardwise.comm.world.run_world`. A pool of workers that lives for the whole
run was measured and not built: starting a world costs 0.05 s (2 processes) to 0.25 s (8) of the 0.6 to 4 s that a case
takes, the rest is the work itself on the cores that there are; a second case in the same world ran 4 to 7% faster.
"""

import torch
from hypothesis import settings

# A process that forks must not have threads that hold locks: no torch operation here may start any.
torch.set_num_threads(1)

# The same examples in every run, and no verdict by time.
settings.register_profile("shardwise", derandomize=True, deadline=None)
settings.load_profile("shardwise")
