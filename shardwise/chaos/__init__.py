"""Fault injection, and whether a run detects each fault and recovers from it."""
