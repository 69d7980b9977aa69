"""Changes that requests ask of their logits: one file per family behind the protocol of `base`."""
