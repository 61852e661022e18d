"""What a run shows of itself. Reads and writes plain files of the run folder; training does not depend on it."""
