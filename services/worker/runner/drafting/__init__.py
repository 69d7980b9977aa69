"""Guesses of the tokens that come next, which a step verifies: no token differs from what would come without them."""
