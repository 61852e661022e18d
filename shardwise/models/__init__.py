"""Models written for one device, and beside each, as data, how it may be cut and what it costs."""
