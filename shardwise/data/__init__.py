"""Samples by global index, in an order that depends on the seed alone."""
