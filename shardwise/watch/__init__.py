"""The report page, live page, comparison and trace of runs. Reads run folders; training does not depend on it."""
