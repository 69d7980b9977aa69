"""The times at which requests come, drawn before the first is sent: they do not depend on the answers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def draw_arrivals(
    num_requests: int, rate: float, burstiness: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return ascending times in seconds, one per request.

    Args:
        rate: Requests per second on average. Infinite: all come at once.
        burstiness: Shape of the gamma distribution of the gaps. 1: a Poisson process; less: bursts; more: evener.
    """
    if math.isinf(rate):
        return np.zeros(num_requests)
    gaps_s = generator.gamma(burstiness, 1.0 / (rate * burstiness), num_requests)  # [num_requests]
    times_s: NDArray[np.float64] = np.cumsum(gaps_s)
    return times_s
