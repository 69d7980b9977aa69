"""From plans to results: rows, input batch, forward, sample. `base` imports no torch: doors stay light."""
