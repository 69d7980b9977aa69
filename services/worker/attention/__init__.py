"""Attention backends, and the batch layout that models pass to them."""
