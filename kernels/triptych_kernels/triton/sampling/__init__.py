"""Changing logits, sampling and log-probabilities."""
