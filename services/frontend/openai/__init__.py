"""The OpenAI-compatible HTTP door."""
