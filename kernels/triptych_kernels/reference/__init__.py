"""Every op in loops and float64, slow and obviously right: only the oracle of the tests."""
