"""How gradients and weights travel."""
