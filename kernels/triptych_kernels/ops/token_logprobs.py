"""Log-probabilities of chosen tokens and of their best rivals."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.registry import find_impl


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look up some rows' chosen tokens and their `num_top` likeliest tokens in each row's log-softmax.

    Row numbers and token ids are not checked: the device is not waited for.

    Args:
        logits: [any, vocab_size] float32, as the model gave them. In rows of which `ops.sample` makes nothing,
            log-probabilities are NaN.
        rows: [num_rows] int64, of the logits.
        token_ids: [num_rows] int64, the chosen tokens.
        num_top: 0..vocab_size.
    Returns:
        chosen_logprobs: [num_rows] float32.
        ranks: [num_rows] int64, 1 + the number of tokens that are likelier than the chosen one.
        top_ids: [num_rows, num_top] int64, likeliest first; the order of equals is not defined.
        top_logprobs: [num_rows, num_top] float32.
    Raises:
        ValueError: shapes or dtypes are others than these, or num_top is out of range; names both.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"token_logprobs: logits {list(logits.shape)} {logits.dtype} must be "
            "[any, vocab_size] torch.float32"
        )
    if rows.ndim != 1 or rows.dtype != torch.int64:
        raise ValueError(
            f"token_logprobs: rows {list(rows.shape)} {rows.dtype} must be [num_rows] torch.int64"
        )
    if token_ids.shape != rows.shape or token_ids.dtype != torch.int64:
        raise ValueError(
            f"token_logprobs: token_ids {list(token_ids.shape)} {token_ids.dtype} do not fit "
            f"rows {list(rows.shape)}; they must be [num_rows] torch.int64"
        )
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"token_logprobs: num_top {num_top} must be 0..vocab_size = {logits.shape[1]}")
    looked_up: tuple[Tensor, Tensor, Tensor, Tensor] = find_impl("token_logprobs", logits, impl)(
        logits, rows, token_ids, num_top
    )
    return looked_up
