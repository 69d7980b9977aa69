"""Ranks of one model: what each holds of a layer, and how they meet and add up."""
