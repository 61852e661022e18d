"""Models written for one device, with their configs, sharding plans, losses, objectives and operator costs."""
