"""Per-rank metrics and experiment trackers."""
