"""How many rows and tokens a step has where the operator leaves that to the device.

A worker decides by its device, and its engine takes what the worker has.

On a device with much memory a step of few rows costs what a step of many does: its weights are read once for all of
them. On the simulation of an 8B model on such a device, 256 rows at a context of 1,000 tokens give 1.8 times the tokens
of 64. A CPU computes many rows little faster than few, and each waits for all of them.
"""

from __future__ import annotations

from dataclasses import replace

from triptych.config.fields import SchedulerConfig

LARGE_DEVICE_BYTES = 40 * 10**9
"""Memory of a device that takes large steps; those that are sold as 40 GB have a little more."""
LARGE_STEP = 256, 8192
"""Rows and tokens of a step on a large device."""
SMALL_STEP = 64, 2048
"""The same on any other, and on a CPU."""
LEAST_STEP_TOKENS = 512
"""Tokens of the smallest step that a default may have. Smaller steps read the weights too often per token."""


def size_for_device(config: SchedulerConfig, device_bytes: int) -> SchedulerConfig:
    """Return the config with a number of rows and a token budget, which fit each other.

    Args:
        device_bytes: Memory of the accelerator; 0: it is a CPU.
    """
    num_rows, num_tokens = LARGE_STEP if device_bytes >= LARGE_DEVICE_BYTES else SMALL_STEP
    max_num_seqs = config.max_num_seqs or min(num_rows, config.max_num_batched_tokens or num_rows)
    budget = config.max_num_batched_tokens or max(num_tokens, max_num_seqs)
    return replace(config, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def next_smaller_step(config: SchedulerConfig, max_model_len: int) -> SchedulerConfig | None:
    """Return the config with half the token budget; None if steps would be too small to serve, or to be worth it.

    Args:
        config: With the sizes that were tried.
        max_model_len: Most tokens of a request. A step must hold them all where prompts are not split.
    """
    num_tokens = config.max_num_batched_tokens // 2
    least = max(LEAST_STEP_TOKENS, config.max_num_seqs, 0 if config.enable_chunked_prefill else max_model_len)
    return replace(config, max_num_batched_tokens=num_tokens) if num_tokens >= least else None


def size_for_worker(
    config: SchedulerConfig, max_num_seqs: int, max_num_batched_tokens: int
) -> SchedulerConfig:
    """Return the config with a worker's sizes for those that the operator has left to it."""
    return replace(
        config,
        max_num_seqs=config.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max_num_batched_tokens,
    )
