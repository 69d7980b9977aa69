"""Attention over the paged cache, and the kernels that write the cache."""
