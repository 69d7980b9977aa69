"""Index columns: which logits to touch, entry by entry, so that nothing is as wide as the vocabulary.

Entries ascend by row, so that rows can be worked on side by side; within a row they stand in any order. That is the
caller's duty and is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Entries (row, token id) of a logits tensor."""

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""


@dataclass(frozen=True, slots=True, eq=False)
class BiasColumns:
    """Entries with something to add; entries that name the same logit add up."""

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""
    biases: Tensor
    """[n] float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyColumns:
    """The distinct tokens of each penalized row's prompt and output, and how hard each row is penalized.

    An entry (row, token id) stands here at most once; that, too, is not checked.
    """

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""
    output_counts: Tensor
    """[n] int64, occurrences in the output; 0: the token stands in the prompt alone."""
    presence: Tensor
    """[num_rows] float32, subtracted from tokens that the output holds; 0 is off."""
    frequency: Tensor
    """[num_rows] float32, subtracted per occurrence in the output; 0 is off."""
    repetition: Tensor
    """[num_rows] float32, > 0, divides positive and multiplies negative logits; 1 is off."""
