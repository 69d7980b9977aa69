"""Limits of an output that are more than one number."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REPETITION = 1024  # tokens of a pattern, and how often it repeats


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """End the output where its last tokens repeat a pattern.

    So `a b c b c b c` ends with `max_pattern_size=2, min_count=3`, since `b c` is there three times.
    """

    max_pattern_size: int
    """Tokens of the longest pattern that is looked for, 1..1024."""
    min_count: int
    """How often the pattern must follow itself, 2..1024."""
    min_pattern_size: int = 1
    """Tokens of the shortest pattern, 1..max_pattern_size."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How long a model may think before it answers, as the worker takes it."""

    num_tokens: int
    """Tokens between the opening and the closing one, at most."""
    opening_id: int
    """The token that opens the reasoning, at the beginning of the output."""
    closing_id: int
    """The token that ends it."""
    is_open: bool
    """The prompt has opened it."""
