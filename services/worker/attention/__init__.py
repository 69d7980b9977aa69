"""The seam between models and attention backends."""
