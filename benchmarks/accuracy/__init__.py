"""Sets an engine's log-probabilities beside float32's, on the same weights."""
