"""Anthropic's Messages API, on the HTTP server of `triptych_services.frontend.http`."""
