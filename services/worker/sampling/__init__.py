"""Chooses tokens from logits: each request's parameters in columns, the arithmetic in ops."""
