"""Shared by all benchmarks: the command line, the clock, the table and the processes."""
