"""The training loop, checkpoints, rollback, validation, metrics and the run folder."""
