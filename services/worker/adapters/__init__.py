"""Low-rank adapters of a served model: read from files, kept in the host's memory, and applied by slot."""
