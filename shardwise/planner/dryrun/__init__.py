"""One training step of any world size on fake tensors: exact memory and communication volume."""
