"""Finds outputs that repeat themselves."""

from __future__ import annotations

import numpy as np

from triptych.types.output_limits import RepetitionDetection
from triptych.types.step import U32


def num_repeated_tokens(detection: RepetitionDetection) -> int:
    """Return how many tokens the longest repetition has that is looked for."""
    return detection.max_pattern_size * detection.min_count


def repeats_itself(output: U32, detection: RepetitionDetection) -> bool:
    """Return whether an output ends with a pattern that follows itself often enough.

        a b c b c b c      sizes 1..3, count 3
              <-> <->      size 2: each of the last 4 tokens is the one 2 places before it

    Args:
        output: [num_tokens] its last tokens, at most `num_repeated_tokens` count.
    """
    num_tokens = len(output)
    largest = min(detection.max_pattern_size, num_tokens // detection.min_count)
    before_last = output[num_tokens - 1 - largest : num_tokens - 1]
    sizes = largest - np.flatnonzero(before_last == output[-1])  # others end with another token
    for size in sizes[sizes >= detection.min_pattern_size].tolist():
        start = num_tokens - size * detection.min_count
        if np.array_equal(output[start + size :], output[start:-size]):
            return True
    return False
