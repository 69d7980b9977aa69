"""Contract of attention over whole texts, without a cache: every token sees those before it and after it.

    score = scale * query . key + distance_bias[head, key position - query position + n - 1]
    out = sum over keys of softmax(scores) * value

All implementations but torch's on CUDA devices give a text the same bits in any batch, and with any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych_kernels.attend_options import AttendOptions
from triptych_kernels.registry import find_impl

__all__ = ["encode_attention"]


def encode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    options: AttendOptions,
    *,
    seq_lens_list: tuple[int, ...] | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attend from each token of a text to all tokens of the same text, or to those within a window.

    Query head h reads key head h // (num_heads // num_kv_heads). With a window w the query at position p sees the keys
    at positions above p - w and below p + w.

    Args:
        query: [num_tokens, num_heads, head_dim], may be a view of a larger tensor, the last axis dense. The tokens of
            a text are contiguous, and texts follow each other.
        key: [num_tokens, num_kv_heads, head_dim] likewise, of the query's dtype.
        value: As `key`.
        query_starts: [num_rows + 1] int32, a text's first token; ends with num_tokens.
        seq_lens: [num_rows] int32, differences of query_starts.
        options: The layer's; `is_causal` must be false, and of the others only `window` and `distance_bias` may be in
            use. The latter must hold as many positions as the longest text has.
        seq_lens_list: [num_rows] values of seq_lens, each >= 1; None means that they are read from the tensor, for
            which the host waits.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor of the query's dtype.
    Raises:
        ValueError: Shapes, dtypes, lengths or options disagree; names both. A recording has no lengths yet, so the
            caller that fills its inputs must check them.
    """
    _check_operands(query, key, value, query_starts, seq_lens)
    if other := sorted(options.in_use - {"window", "distance_bias", "is_causal"}) or options.is_causal:
        raise ValueError(
            f"encode_attention: is_causal must be False and no option but window and distance_bias in use, not {other}"
        )
    if query.device.type != "meta":
        if seq_lens_list is None:
            seq_lens_list = tuple(seq_lens.tolist())
        if sum(seq_lens_list) != len(query) or min(seq_lens_list, default=1) < 1:
            raise ValueError(
                f"encode_attention: seq_lens {seq_lens_list} must be positive and sum to the {len(query)} tokens"
            )
        _check_distances(options, query, max(seq_lens_list, default=1))
    out: Tensor = find_impl("encode_attention", query, impl)(
        query, key, value, query_starts, seq_lens, options, seq_lens_list=seq_lens_list
    )
    return out


def _check_distances(options: AttendOptions, query: Tensor, longest: int) -> None:
    bias = options.distance_bias
    if bias is None:
        return
    if len(bias) != query.shape[1] or bias.shape[1] < 2 * longest - 1 or bias.device != query.device:
        raise ValueError(
            f"encode_attention: distance_bias {list(bias.shape)} on {bias.device} does not fit query "
            f"{list(query.shape)} on {query.device} with a text of {longest} tokens"
        )


def _check_operands(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, seq_lens: Tensor
) -> None:
    if (
        query.ndim != 3
        or key.ndim != 3
        or key.shape[::2] != query.shape[::2]
        or query.shape[1] % key.shape[1]
        or value.shape != key.shape
    ):
        raise ValueError(
            f"encode_attention: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must be "
            "[num_tokens, heads, head_dim], with a multiple of the key's heads in the query"
        )
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if operand.stride(2) != 1 or operand.dtype != query.dtype:
            raise ValueError(
                f"encode_attention: {name} {operand.dtype} with strides {operand.stride()} must be of the query's "
                f"{query.dtype}, the last axis dense"
            )
    num_rows = len(seq_lens)
    if seq_lens.shape != (num_rows,) or query_starts.shape != (num_rows + 1,):
        raise ValueError(
            f"encode_attention: query_starts {list(query_starts.shape)} must be one longer than seq_lens "
            f"{list(seq_lens.shape)}"
        )
    if query_starts.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError(
            f"encode_attention: query_starts {query_starts.dtype} and seq_lens {seq_lens.dtype} must be torch.int32"
        )
