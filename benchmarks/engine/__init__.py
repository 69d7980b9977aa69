"""The engine core, without a worker."""
