"""From logits to the scores of given tokens, for adapters of peers that show logits."""

from __future__ import annotations

import numpy as np
from protocol import Scored


def scored(logits: np.ndarray, tokens: list[int]) -> Scored:
    """Return the scores of `tokens`.

    Args:
        logits: [num_tokens, vocab_size] float64 before each of them.
    """
    best = logits.max(axis=1)
    chosen = logits[np.arange(len(tokens)), tokens] - best
    logprobs = chosen - np.log(np.exp(logits - best[:, None]).sum(axis=1))
    return Scored(logprobs.tolist(), (logits.argmax(axis=1) == tokens).tolist())
