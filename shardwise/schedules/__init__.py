"""Pipeline schedules: PyTorch's own, simulated, in closed form, and synthesized for a layout."""
