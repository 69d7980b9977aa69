"""Choosing the next token, with random numbers that depend on nothing but seed, position and token."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl

_COLUMN_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    impl: str | None = None,
) -> Tensor:
    """One token per row.

    A row of temperature 0 is greedy: the largest logit, of equals the lowest id. Any other row takes
    `argmax(logit / temperature + gumbel)` over the tokens that three filters keep, each on the probabilities
    that the filter before it leaves, renormalised:

        min_p   probability >= min_p * the largest
        top_k   the k largest; 0 or k >= vocab_size is off
        top_p   the fewest largest whose sum reaches top_p; 1 is off

    Equal logits are kept or dropped together, so that a kept set depends on values alone, never on an order.

    The noise of token t of a row with seed s at position p:

        word   = philox4x32-10(key = (s lo32, s hi32), counter = (p lo32, p hi32, t // 4, 0))[t % 4]
        u      = (word + 0.5) / 2^32                    in (0, 1)
        gumbel = -log(-log(u))                          to float32 accuracy, finite

    so a row's token does not depend on the other rows, on their order or on how the vocabulary is split.

    Args:
        logits: [num_rows, vocab_size] float32.
        temperature: [num_rows] float32, >= 0.
        top_k: [num_rows] int32, >= 0.
        top_p: [num_rows] float32, in (0, 1].
        min_p: [num_rows] float32, in [0, 1].
        seeds: [num_rows] int64, the bits of a u64.
        positions: [num_rows] int64, of the token to be sampled, in its sequence.
    Returns:
        [num_rows] int64; -1 where there is nothing to choose from: a logit is NaN, the largest is infinite, or
            all are -inf.
    Raises:
        ValueError: shapes or dtypes are others than these; names both.
    Source: Gumbel-max, arXiv:1411.0030; Philox, Salmon et al., SC 2011; nucleus, arXiv:1904.09751;
        min-p, arXiv:2407.01082.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"sample: logits {list(logits.shape)} {logits.dtype} must be [num_rows, vocab_size] torch.float32"
        )
    columns = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "positions": positions,
    }
    for name, column in columns.items():
        if column.shape != logits.shape[:1] or column.dtype != _COLUMN_DTYPES[name]:
            raise ValueError(
                f"sample: {name} {list(column.shape)} {column.dtype} does not fit logits "
                f"{list(logits.shape)}; it must be [num_rows] {_COLUMN_DTYPES[name]}"
            )
    token_ids: Tensor = find_impl("sample", logits, impl)(logits, **columns)
    return token_ids
