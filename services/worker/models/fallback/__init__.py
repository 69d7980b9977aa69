"""Any decoder of transformers: its own modules around our products, our paged attention and our cache."""

IMPLEMENTATION = "triptych"
"""Name of our functions in transformers' interfaces of attention and experts."""
