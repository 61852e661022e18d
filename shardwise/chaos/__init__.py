"""Fault injection, and what the run made of each fault."""
