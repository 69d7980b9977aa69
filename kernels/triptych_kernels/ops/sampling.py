"""Contracts of changing logits, choosing the next token and looking up log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.logit_index import BiasColumns, PenaltyColumns, TokenColumns, TokenMasks
from triptych_kernels.registry import find_impl

__all__ = ["process_logits", "sample", "token_logprobs"]


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
    """Copy some rows and apply the given changes in this order:

        allowed     in the rows that it names, every other token becomes -inf; other rows stay as they are
        banned      the named logits become -inf (end tokens below min_tokens)
        biases      are added
        penalties   repetition: logits > 0 are divided by it, others multiplied, for tokens of prompt or output;
                    then frequency * count and presence are subtracted for tokens of the output

    Row numbers, their order and token ids are not checked, since that would wait for the device.

    Args:
        logits: [any, vocab_size] float32; never written.
        rows: [num_rows] int64, row numbers of the logits. The columns name rows of the result: 0..num_rows - 1.
        allowed: Tokens that may be chosen; None restricts no row.
        banned: Tokens that may not be chosen; None bans none.
        biases: Numbers to add; None adds none.
        penalties: Tokens of prompts and outputs, and how hard each row is penalized; None penalizes none.
    Returns:
        [num_rows, vocab_size] float32.
    Raises:
        ValueError: Shapes or dtypes differ from these; names both.
    Source: penalties as in OpenAI's API (presence, frequency) and CTRL, arXiv:1909.05858 (repetition).
    """
    _check_process_logits(logits, rows, allowed, banned, biases, penalties)
    processed: Tensor = find_impl("process_logits", logits, impl)(
        logits, rows, allowed, banned, biases, penalties
    )
    return processed


def _check_process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed: TokenColumns | None,
    banned: TokenColumns | None,
    biases: BiasColumns | None,
    penalties: PenaltyColumns | None,
) -> None:
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


def _check_equal(what: str, **columns: Tensor) -> None:
    """Check that all columns have one axis, of the same length.

    Raises:
        ValueError: They do not; names all.
    """
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"process_logits: {what} must have columns of one length, not {listed}")


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
    rows: Tensor | None = None,
    masks: TokenMasks | None = None,
    impl: str | None = None,
) -> Tensor:
    """Choose one token for each row.

    A token that the row's mask lacks counts as one with a logit of -inf, whatever its own is.

    A row of temperature 0 is greedy: it takes the largest logit, of equals the lowest id. Any other row takes
    `argmax(logit / temperature + gumbel)` over the tokens that three filters keep. Each filter works on the
    probabilities that the filter before it leaves, renormalised:

        min_p   probability >= min_p * the largest
        top_k   the k largest; 0 or k >= vocab_size is off
        top_p   the fewest largest with a sum that reaches top_p; 1 is off

    Equal logits are kept or dropped together, so that a kept set depends only on values, never on an order.

    The noise of token t of a row with seed s at position p:

        word   = philox4x32-10(key = (s lo32, s hi32), counter = (p lo32, p hi32, t // 4, 0))[t % 4]
        u      = (word + 0.5) / 2^32                    in (0, 1)
        gumbel = -log(-log(u))                          to float32 accuracy, finite

    so a row's token does not depend on the other rows, on their order or on how the vocabulary is split.

    Args:
        logits: [num_rows, vocab_size] float32; with `rows`, [any, vocab_size].
        temperature: [num_rows] float32, >= 0.
        top_k: [num_rows] int32, >= 0.
        top_p: [num_rows] float32, in (0, 1].
        min_p: [num_rows] float32, in [0, 1].
        seeds: [num_rows] int64, the bits of a u64.
        positions: [num_rows] int64, position of the token to be sampled in its sequence.
        rows: [num_rows] int64, row of the logits for each, not checked; None: all of them, in order.
        masks: Tokens that may be chosen; None restricts no row.
    Returns:
        [num_rows] int64; -1 if there is nothing to choose from: a logit is NaN, the largest is infinite, or all are
            -inf.
    Raises:
        ValueError: Shapes or dtypes differ from these; names both.
    Source: Gumbel-max, arXiv:1411.0030; Philox, Salmon et al., SC 2011; nucleus, arXiv:1904.09751;
        min-p, arXiv:2407.01082.
    """
    columns = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seeds": seeds,
        "positions": positions,
    }  # fmt: skip
    _check_sample(logits, columns, rows, masks)
    token_ids: Tensor = find_impl("sample", logits, impl)(logits, rows=rows, masks=masks, **columns)
    return token_ids


def _check_sample(
    logits: Tensor, columns: dict[str, Tensor], rows: Tensor | None, masks: TokenMasks | None
) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"sample: logits {list(logits.shape)} {logits.dtype} must be [num_rows, vocab_size] torch.float32"
        )
    if rows is not None and (rows.ndim != 1 or rows.dtype != torch.int64):
        raise ValueError(f"sample: rows {list(rows.shape)} {rows.dtype} must be [num_rows] torch.int64")
    num_rows = logits.shape[0] if rows is None else rows.shape[0]
    if masks is not None:
        _check_masks(masks, num_rows, logits.shape[1])
    for name, column in columns.items():
        if column.shape != (num_rows,) or column.dtype != _COLUMN_DTYPES[name]:
            raise ValueError(
                f"sample: {name} {list(column.shape)} {column.dtype} does not fit logits "
                f"{list(logits.shape)}; it must be [num_rows] {_COLUMN_DTYPES[name]}"
            )


def _check_masks(masks: TokenMasks, num_rows: int, vocab_size: int) -> None:
    numbers, words = masks.rows, masks.words
    if numbers.shape != (num_rows,) or numbers.dtype != torch.int32:
        raise ValueError(
            f"sample: masks.rows {list(numbers.shape)} {numbers.dtype} must be [{num_rows}] torch.int32"
        )
    num_words = -(-vocab_size // 32)
    if words.ndim != 2 or words.shape[1] != num_words or words.dtype != torch.int32:
        raise ValueError(
            f"sample: masks.words {list(words.shape)} {words.dtype} do not fit {vocab_size} tokens; they must be "
            f"[num_masks, {num_words}] torch.int32"
        )


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look up some rows' chosen tokens and their `num_top` likeliest tokens in each row's log-softmax.

    Row numbers and token ids are not checked, since that would wait for the device.

    Args:
        logits: [any, vocab_size] float32, as the model gave them. In rows for which `ops.sample` returns -1, the
            log-probabilities are NaN.
        rows: [num_rows] int64, row numbers of the logits.
        token_ids: [num_rows] int64, the chosen tokens.
        num_top: Number of likeliest tokens to return, 0..vocab_size.
    Returns:
        chosen_logprobs: [num_rows] float32.
        ranks: [num_rows] int64, 1 + the number of tokens that are likelier than the chosen one.
        top_ids: [num_rows, num_top] int64, likeliest first; the order of equals is not defined.
        top_logprobs: [num_rows, num_top] float32.
    Raises:
        ValueError: Shapes or dtypes differ from these, or num_top is out of range; names both.
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
