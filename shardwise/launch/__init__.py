"""Starting a run: local processes, torchrun or Slurm."""
