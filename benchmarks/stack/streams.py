"""Streams of clients, and the gaps between the deltas that they read."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from triptych.client.grpc_client import GenerationClient
from triptych.client.stream_stats import StreamStats


async def p99_gap_s(client: GenerationClient, num_streams: int, output_len: int, *, seed: int = 0) -> float:
    """Read streams side by side and return the 99th percentile of all their gaps."""

    async def read(number: int) -> list[float]:
        stats = StreamStats()
        async for event in client.generate([seed, number, 11], sampling(output_len, seed)):
            stats.add(event)
        return stats.gaps_s

    gaps_s = await asyncio.gather(*(read(number) for number in range(num_streams)))
    return float(np.percentile(np.concatenate(gaps_s), 99))


def sampling(output_len: int, seed: int) -> dict[str, Any]:
    """Return the parameters of a stream of exactly `output_len` tokens."""
    return {"max_tokens": output_len, "ignore_eos": True, "seed": seed}
