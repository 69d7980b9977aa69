"""The sizes of steps that are recorded as CUDA graphs. Needs no torch."""

from __future__ import annotations

from triptych.checkpoint.architecture import ModelArchitecture

LEAST_GRAPH_TOKENS, MOST_GRAPH_TOKENS = 512, 2048
"""Bounds of `graph_token_limit`."""

_LAUNCH_NS = 220_000
"""The host's time to launch one layer: 11 kernels of some 20 us. Estimated, not measured."""
_DEVICE_MACS_PER_NS = 300_000
"""Multiply-adds of a device of 600 TFLOP/s."""


def graph_token_limit(architecture: ModelArchitecture) -> int:
    """Return the number of tokens of the longest step with prompts that is recorded.

    Longer steps keep the device busy for longer than the host takes to launch them, and padding them would cost more
    than a graph saves.
    """
    heads = architecture.num_heads + architecture.num_kv_heads
    mlp = 3 * max(layer.active_columns for layer in architecture.layers)
    # of one layer's products
    macs_per_token = architecture.hidden_size * (2 * heads * architecture.head_dim + mlp)
    limit = _LAUNCH_NS * _DEVICE_MACS_PER_NS // max(macs_per_token, 1)
    return max(LEAST_GRAPH_TOKENS, min(limit, MOST_GRAPH_TOKENS))


def token_buckets(max_num_tokens: int) -> tuple[int, ...]:
    """Return the token counts of steps with prompts that are recorded, ascending up to `max_num_tokens`.

    The time of few tokens is that of reading the weights, so padding costs them nothing. Many tokens are padded little.
    """
    sizes = {
        *range(16, 64, 16),
        *range(64, 256, 32),
        *range(256, 1024, 64),
        *range(1024, max_num_tokens, 128),
    }
    return tuple(sorted({size for size in sizes if size < max_num_tokens} | {max_num_tokens}))


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes of decodes that are recorded, ascending up to `max_num_seqs`.

    Few rows are padded little, since padding is a large part of them. For many rows graphs are fewer, since each takes
    memory.
    """
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs, 32), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))
