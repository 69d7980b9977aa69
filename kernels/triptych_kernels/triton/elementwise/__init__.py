"""Normalisation, activation and lookup."""
