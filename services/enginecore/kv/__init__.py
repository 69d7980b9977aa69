"""Paged KV blocks: allocation, sharing, and the prefix cache."""
