"""Watching over a run: heartbeats, restarts, who is to blame for a hang, numbers that go wrong."""
