"""The HTTP server, and the APIs that are spoken on it."""
