"""The ranks of one model: the share of a layer that each holds, and the communication between them."""
