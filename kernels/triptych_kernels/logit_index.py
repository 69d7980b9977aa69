"""Which logits are meant: by columns of entries (row, token id), or by a bit for each token.

Entries must ascend by row, so that rows can be computed in parallel; within a row they have any order. This is not
checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Selected logits."""

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""


@dataclass(frozen=True, slots=True, eq=False)
class BiasColumns:
    """Numbers to add to selected logits; entries of the same logit add up."""

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""
    biases: Tensor
    """[n] float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PenaltyColumns:
    """The distinct tokens of each penalized row's prompt and output, and the strength of each row's penalties.

    An entry (row, token id) may occur only once, which is not checked.
    """

    rows: Tensor
    """[n] int64, ascending."""
    token_ids: Tensor
    """[n] int64."""
    output_counts: Tensor
    """[n] int64, occurrences in the output; 0 means that only the prompt has the token."""
    presence: Tensor
    """[num_rows] float32, subtracted from the logits of tokens in the output; 0 is off."""
    frequency: Tensor
    """[num_rows] float32, subtracted for each occurrence in the output; 0 is off."""
    repetition: Tensor
    """[num_rows] float32, > 0, divides positive and multiplies negative logits; 1 is off."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """The tokens that may be chosen in some rows, a bit each."""

    rows: Tensor
    """[num_rows] int32, number of each row's mask; -1: it has none. Not checked."""
    words: Tensor
    """[num_masks, vocab_size / 32 rounded up] int32, bit t % 32 of word t // 32: token t may be chosen. Bits past the
    vocabulary say nothing."""
