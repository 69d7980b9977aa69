"""A way from the states of a text's tokens to its vector: a mean in which later tokens weigh more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def weighted_mean(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of states, [num_tokens, hidden_size], weighted by the place of each token, 1, 2, 3, …

    Source: Muennighoff, "SGPT: GPT Sentence Embeddings for Semantic Search", 2022.
    """
    weights = np.arange(1, len(states) + 1, dtype=np.float64)
    mean: NDArray[np.float64] = np.einsum("i,ij->j", weights, states.astype(np.float64)) / weights.sum()
    return mean.astype(np.float32)
