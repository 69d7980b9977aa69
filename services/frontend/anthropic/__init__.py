"""Anthropic's Messages API, on the HTTP server of `services.frontend.openai`."""
