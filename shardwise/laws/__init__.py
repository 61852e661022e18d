"""Scaling laws: small runs designed, a law fitted to them, and what it says of a large one."""
