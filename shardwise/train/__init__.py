"""The loop, checkpoints, recovery and how worlds of processes are started."""
