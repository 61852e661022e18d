"""One file per axis, and `parallelize`, the one place that knows their order."""
