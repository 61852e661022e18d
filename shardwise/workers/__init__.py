"""Where worker processes come from, how they are watched, and how they are replaced."""
