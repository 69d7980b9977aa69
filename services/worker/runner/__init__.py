"""From plans to results: rows, input batch, forward, sample. `base` imports no torch, so servicers stay light."""
