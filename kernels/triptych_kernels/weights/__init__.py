"""Weights of linear layers that are not plain tensors."""
