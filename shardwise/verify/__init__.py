"""Verifies that a layout computes what a single process computes."""
