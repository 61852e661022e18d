"""Measurements that a user asks for by `shardwise bench`."""
