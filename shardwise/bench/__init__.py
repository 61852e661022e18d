"""The benchmarks of `shardwise bench`."""
