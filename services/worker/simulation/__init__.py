"""A runner without a model: the real step protocol, deterministic tokens, modelled times. Imports no torch."""
