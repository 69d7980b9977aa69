"""Weights from files into a model: safetensors, GGUF, or drawn from a seed."""
