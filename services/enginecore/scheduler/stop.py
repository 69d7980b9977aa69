"""Decides which token ends its request, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.types.output_limits import RepetitionDetection
from triptych.types.outputs import FinishReason
from triptych.types.step import U32
from triptych_services.enginecore.request import Request


def find_stop(
    request: Request, token_id: int, num_known: int, eos_token_ids: Sequence[int]
) -> tuple[FinishReason, int | None] | None:
    """Return why a token ends its request, and the stop id that did; None if the request continues.

    Only the engine decides this. The order is: min_tokens, EOS, stop_token_ids, length, repetition. The length limit
    holds below min_tokens as well.

    Args:
        token_id: The token at position `num_known - 1`.
        eos_token_ids: The tokenizer's own EOS first. Another EOS that the model names is reported like a stop id.
    """
    sampling = request.sampling
    if num_known - request.num_prompt_tokens >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, token_id if token_id != eos_token_ids[0] else None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_known >= request.limit:
        return FinishReason.LENGTH, None
    return None


def find_repetition(request: Request, tail: U32, num_known: int) -> tuple[FinishReason, None] | None:
    """Return the reason if the output repeats itself, else None.

    Args:
        tail: The last tokens of the output, as many as may count.
    """
    sampling = request.sampling
    assert sampling.repetition_detection is not None
    if num_known - request.num_prompt_tokens < sampling.min_tokens:
        return None
    repeats = repeats_itself(tail, sampling.repetition_detection)
    return (FinishReason.REPETITION, None) if repeats else None


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
