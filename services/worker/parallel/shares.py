"""The share of a layer that each tensor-parallel rank holds. Needs no torch."""

from __future__ import annotations

from services.worker.context.resolved_config import RankFacts
from triptych.errors import ConfigError

_VOCAB_ALIGNMENT = 16  # rows of a share: products on GPUs store their outputs in pieces of 16 bytes and more


def share(size: int, *, what: str, rank: RankFacts) -> tuple[int, int]:
    """Return this rank's part of `size` equal things: the index of the first, and their number.

    Args:
        what: Name of the things, for the error.

    Raises:
        ConfigError: The number of ranks does not divide `size`.
    """
    num_ranks = rank.tensor_parallel_size
    if size % num_ranks:
        raise ConfigError(f"parallel.tensor_parallel_size: {num_ranks} does not divide {what} = {size}")
    return rank.tensor_parallel_rank * (size // num_ranks), size // num_ranks


def share_kv_heads(num_kv_heads: int, *, rank: RankFacts) -> tuple[int, int]:
    """Return this rank's key heads: the index of the first, and their number.

    Where there are more ranks than heads, neighbouring ranks hold the same head.

    Raises:
        ConfigError: Neither number divides the other.
    """
    num_ranks = rank.tensor_parallel_size
    if num_ranks > num_kv_heads and num_ranks % num_kv_heads == 0:
        return rank.tensor_parallel_rank // (num_ranks // num_kv_heads), 1
    return share(num_kv_heads, what="num_kv_heads", rank=rank)


def vocab_lengths(vocab_size: int, *, rank: RankFacts) -> tuple[int, ...]:
    """Return how many tokens of the vocabulary each rank holds, by rank.

    The lengths are equal if the number of ranks divides the vocabulary. Otherwise they are about equal, and all but the
    last are multiples of 16.

    Raises:
        ConfigError: There are so few tokens that a rank would have none.
    """
    num_ranks = rank.tensor_parallel_size
    if vocab_size % num_ranks == 0:
        return (vocab_size // num_ranks,) * num_ranks
    num_pieces = -(-vocab_size // _VOCAB_ALIGNMENT)
    if num_pieces < num_ranks:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {num_ranks} does not divide vocab_size = {vocab_size}, which has fewer "
            f"pieces of {_VOCAB_ALIGNMENT} tokens than there are ranks"
        )
    firsts = [num_pieces * index // num_ranks * _VOCAB_ALIGNMENT for index in range(num_ranks)]
    return tuple(end - first for first, end in zip(firsts, [*firsts[1:], vocab_size], strict=True))
