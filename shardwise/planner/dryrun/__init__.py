"""One training step of any world on fake tensors: exact memory and traffic."""
