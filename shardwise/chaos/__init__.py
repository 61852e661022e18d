"""Faults planted on purpose, and what came of them."""
