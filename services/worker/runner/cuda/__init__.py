"""The runner on an asynchronous device: steps in flight, tokens that stay there, graphs."""
