"""Every op the slow, obviously right way, in loops and float64: the oracle of the tests, and nothing else."""
