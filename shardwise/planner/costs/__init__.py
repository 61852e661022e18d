"""What models, devices and the engine cost in time and memory."""
