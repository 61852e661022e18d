"""Shardwise: train PyTorch models in any layout, proven equal to one device."""

__version__ = "0.1.0"
