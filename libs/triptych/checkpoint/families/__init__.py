"""The families of decoders: what the keys of their config.json mean, one file per group."""
