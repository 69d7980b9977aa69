"""Decides what each request computes in the next step, and reads the tokens of the last one."""
