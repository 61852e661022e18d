"""Scaling laws: design small runs, fit a law to them, and recommend size and tokens for a budget."""
