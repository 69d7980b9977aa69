"""What each tensor-parallel rank holds of a layer. Needs no torch."""

from __future__ import annotations

from services.worker.context.resolved import ResolvedConfig
from triptych.errors import ConfigError

_VOCAB_ALIGNMENT = 16  # rows of a share: products on GPUs store their outputs in pieces of 16 bytes and more


def share(size: int, *, what: str, config: ResolvedConfig) -> tuple[int, int]:
    """This rank's part of `size` equal things: the first one, and how many.

    Args:
        what: names the things, for the error.
    Raises:
        ConfigError: they cannot be shared out evenly.
    """
    rank, num_ranks = config.rank.tensor_parallel_rank, config.rank.tensor_parallel_size
    if size % num_ranks:
        raise ConfigError(f"parallel.tensor_parallel_size: {num_ranks} does not divide {what} = {size}")
    return rank * (size // num_ranks), size // num_ranks


def share_kv_heads(num_kv_heads: int, *, config: ResolvedConfig) -> tuple[int, int]:
    """This rank's key heads: the first one, and how many. Where there are more ranks than heads, neighbours hold the
    same one.

    Raises:
        ConfigError: neither do the ranks share out the heads evenly, nor the heads the ranks.
    """
    num_ranks = config.rank.tensor_parallel_size
    if num_ranks > num_kv_heads and num_ranks % num_kv_heads == 0:
        return config.rank.tensor_parallel_rank // (num_ranks // num_kv_heads), 1
    return share(num_kv_heads, what="num_kv_heads", config=config)


def vocab_lengths(vocab_size: int, *, config: ResolvedConfig) -> tuple[int, ...]:
    """How many tokens of the vocabulary each rank holds, in its order: as many each, or else about as many, and all but
    the last a multiple of 16.

    Raises:
        ConfigError: so few tokens that a rank would have none.
    """
    num_ranks = config.rank.tensor_parallel_size
    if vocab_size % num_ranks == 0:
        return (vocab_size // num_ranks,) * num_ranks
    num_pieces = -(-vocab_size // _VOCAB_ALIGNMENT)
    if num_pieces < num_ranks:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {num_ranks} does not divide vocab_size = {vocab_size}, which has fewer "
            f"pieces of {_VOCAB_ALIGNMENT} tokens than there are ranks"
        )
    firsts = [num_pieces * rank // num_ranks * _VOCAB_ALIGNMENT for rank in range(num_ranks)]
    return tuple(end - first for first, end in zip(firsts, [*firsts[1:], vocab_size], strict=True))
