"""Pipeline schedules: named, simulated, in closed form and synthesised."""
