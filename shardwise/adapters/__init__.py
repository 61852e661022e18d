"""Models that are not ours: any `nn.Module`, and transformers' models."""
