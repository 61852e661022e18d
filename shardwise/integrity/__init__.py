"""Detects non-finite gradients, loss spikes and silent data corruption, and decides how the run reacts."""
