"""Measured tiles, and compilation of kernels before their first launch."""
