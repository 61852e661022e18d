"""Embedding tables sharded over the host memory of all ranks."""
