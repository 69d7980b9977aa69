"""The worker and its connection."""
