"""What `benchmarks/gpu.py` measures, by section."""
