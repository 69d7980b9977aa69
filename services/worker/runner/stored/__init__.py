"""A start from a recorded program that an earlier start has stored, without torch: docs/adr/0075."""
