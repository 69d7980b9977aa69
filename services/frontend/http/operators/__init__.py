"""Operators' calls over HTTP."""
