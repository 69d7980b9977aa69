"""What requests ask of their logits before sampling: allowed and banned tokens, biases, penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns
from triptych_kernels.registry import find_impl


def process_logits(
    logits: Tensor,
    rows: Tensor,
    *,
    allowed: TokenColumns | None = None,
    banned: TokenColumns | None = None,
    biases: BiasColumns | None = None,
    penalties: PenaltyColumns | None = None,
    impl: str | None = None,
) -> Tensor:
    """Copy some rows and apply, in this order, what is given:

        allowed     in the rows that it names, every other token becomes -inf; other rows are left alone
        banned      the named logits become -inf (end tokens below min_tokens)
        biases      are added
        penalties   repetition: logits > 0 are divided by it, others multiplied, for tokens of prompt or output;
                    then frequency * count and presence are subtracted for tokens of the output

    Row numbers, their order and token ids are not checked: the device is not waited for.

    Args:
        logits: [any, vocab_size] float32; never written.
        rows: [num_rows] int64, of the logits. The columns count in rows of the result: theirs are 0..num_rows - 1.
    Returns:
        [num_rows, vocab_size] float32.
    Raises:
        ValueError: shapes or dtypes are others than these; names both.
    Source: penalties as in OpenAI's API (presence, frequency) and CTRL, arXiv:1909.05858 (repetition).
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"process_logits: logits {list(logits.shape)} {logits.dtype} must be "
            "[any, vocab_size] torch.float32"
        )
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise ValueError(
            f"process_logits: rows {list(rows.shape)} {rows.dtype} must be [num_rows] torch.int64"
        )
    if allowed is not None:
        _check_equal("allowed", rows=allowed.rows, token_ids=allowed.token_ids)
    if banned is not None:
        _check_equal("banned", rows=banned.rows, token_ids=banned.token_ids)
    if biases is not None:
        _check_equal("biases", rows=biases.rows, token_ids=biases.token_ids, biases=biases.biases)
    if penalties is not None:
        _check_equal(
            "penalties",
            rows=penalties.rows,
            token_ids=penalties.token_ids,
            output_counts=penalties.output_counts,
        )
        _check_equal(
            "penalties",
            rows=rows,
            presence=penalties.presence,
            frequency=penalties.frequency,
            repetition=penalties.repetition,
        )
    processed: Tensor = find_impl("process_logits", logits, impl)(
        logits, rows, allowed, banned, biases, penalties
    )
    return processed


def _check_equal(what: str, **columns: Tensor) -> None:
    """All columns have one axis, of the same length."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"process_logits: {what} must have columns of one length, not {listed}")
