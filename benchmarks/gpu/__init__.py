"""The GPU worker: its kernels beside the device's limits, its models, and its start."""
