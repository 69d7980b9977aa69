"""Kernels for CUDA devices, in Triton. With `TRITON_INTERPRET=1` they run on tensors of the CPU, for tests."""
