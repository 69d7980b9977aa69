"""What `tools/tune_gpu.py` does: times the kernels' candidates for a device's tiles and stores the fastest."""
