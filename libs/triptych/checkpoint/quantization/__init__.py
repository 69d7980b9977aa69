"""Schemes of quantized weights, as published checkpoints describe them; without torch."""
