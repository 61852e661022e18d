"""Starting, monitoring, diagnosing and restarting worker processes."""
