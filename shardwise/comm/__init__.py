"""Collectives, all-reduce algorithms, worlds of local processes, and the step timer."""
