"""A model's name -> a directory with config.json, tokenizer.json and weights."""

from triptych.hub.cache import cache_home
from triptych.hub.resolve import EMBEDDED, resolve_adapter, resolve_model

__all__ = ["EMBEDDED", "cache_home", "resolve_adapter", "resolve_model"]
