"""Measures a running stack through its public API: throughput, time to first token, gaps between tokens."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.client.grpc_client import GenerationClient
from triptych.client.stream_stats import StreamStats
from triptych.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one round: prompts of random token ids, answers of a fixed length."""

    num_prompts: int
    input_len: int
    """Tokens per prompt."""
    output_len: int
    """Tokens per answer; end-of-sequence is ignored."""
    concurrency: int
    """Requests in flight."""
    seed: int = 0
    """Same seed, same prompts; each round draws its own, so that none finds its prefix cached."""


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one round."""

    wall_s: float
    num_input_tokens: int
    num_output_tokens: int
    ttfts_s: list[float]
    gaps_s: list[float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the rounds. Rates are over the whole round, prefill included."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens."""
    wall_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


async def measure(
    client: GenerationClient,
    workload: Workload,
    num_rounds: int,
    on_round: Callable[[Round], None] = lambda done: None,
) -> Summary:
    """Run a small warm-up and `num_rounds` rounds; each but the warm-up is given to `on_round` when done."""
    vocab_size = (await client.list_models())[0].vocab_size
    warm_up = Workload(1, workload.input_len, min(workload.output_len, 8), 1, workload.seed)
    await _run_round(client, warm_up, vocab_size, round_number=0)
    rounds = []
    for number in range(1, num_rounds + 1):
        rounds.append(await _run_round(client, workload, vocab_size, number))
        on_round(rounds[-1])
    return summarize(rounds)


def summarize(rounds: Sequence[Round]) -> Summary:
    """The median of each figure over the rounds; percentiles are taken within a round."""

    def median(figure: Callable[[Round], float]) -> float:
        return statistics.median(figure(one) for one in rounds)

    return Summary(
        output_tokens_per_s=median(lambda r: r.num_output_tokens / r.wall_s),
        total_tokens_per_s=median(lambda r: (r.num_input_tokens + r.num_output_tokens) / r.wall_s),
        wall_s=median(lambda r: r.wall_s),
        ttft_p50_ms=median(lambda r: _percentile_ms(r.ttfts_s, 50)),
        ttft_p99_ms=median(lambda r: _percentile_ms(r.ttfts_s, 99)),
        itl_p50_ms=median(lambda r: _percentile_ms(r.gaps_s, 50)),
        itl_p99_ms=median(lambda r: _percentile_ms(r.gaps_s, 99)),
    )


async def _run_round(
    client: GenerationClient, workload: Workload, vocab_size: int, round_number: int
) -> Round:
    generator = np.random.default_rng([workload.seed, round_number])
    shape = (workload.num_prompts, workload.input_len)
    prompts: list[list[int]] = generator.integers(0, vocab_size, shape).tolist()
    in_flight = asyncio.Semaphore(workload.concurrency)

    async def run_one(prompt: list[int]) -> StreamStats:
        async with in_flight:
            return await _stream(client, prompt, workload.output_len)

    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run_one(prompt)) for prompt in prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the others, if any, say the same or were cancelled by it
    wall_s = time.perf_counter() - started_s
    streams = [task.result() for task in tasks]
    return Round(
        wall_s=wall_s,
        num_input_tokens=workload.num_prompts * workload.input_len,
        num_output_tokens=sum(stream.num_tokens for stream in streams),
        ttfts_s=[stream.ttft_s for stream in streams],
        gaps_s=[gap for stream in streams for gap in stream.gaps_s],
    )


async def _stream(client: GenerationClient, prompt: list[int], output_len: int) -> StreamStats:
    """One answer. The clock runs on while a full server makes us wait: its users would wait, too."""
    stats = StreamStats()
    sampling = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, "detokenize": True}
    while True:
        try:
            async for event in client.generate(prompt, sampling):
                stats.add(event)
            return stats
        except QueueFull as error:
            await asyncio.sleep(error.retry_after_s)


def _percentile_ms(values_s: Sequence[float], percent: float) -> float:
    return float(np.percentile(values_s, percent)) * 1e3 if len(values_s) else 0.0
