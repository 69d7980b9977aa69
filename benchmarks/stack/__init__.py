"""All services together."""
