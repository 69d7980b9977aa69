"""The parts of models: each creates only its rank's share of its weights, from `config` and `prefix`."""
