"""Rounds of equal requests over gRPC, with a fixed number in flight. Figures are medians over the rounds.

Prompts are random token ids of a fixed seed, other ones in each round, so that no prefix is found cached.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.cli.access import Frontend, add_address_argument
from triptych.cli.stack import stack_to_measure
from triptych.client.load.backends import GrpcBackend, TokenCounts
from triptych.client.load.datasets import Lengths, LoadRequest, draw_random
from triptych.client.load.run import run_load
from triptych.client.load.statistics import LoadSummary, summarize
from triptych.config.loader import add_config_flags
from triptych.errors import ConfigError, QueueFull, TriptychError

_SAMPLING = {"temperature": 0.0, "ignore_eos": True, "detokenize": True}
_WARM_UP_LEN = 8


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, metavar="N", help="per round (default: 64; latency: 1)")
    parser.add_argument(
        "--input-len", type=int, default=128, metavar="N", help="tokens per prompt (default: 128)"
    )
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="new tokens each (default: 128)"
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="requests in flight (default: all; latency: 1)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_address_argument(parser, default=None)
    parser.usage = f"{parser.prog} [options] [--SECTION.OPTION VALUE ...]"
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    workload = _workload(arguments)
    with stack_to_measure(arguments) as frontend:
        figures = medians(asyncio.run(_measure(frontend, workload, arguments.rounds)))
    if arguments.json:
        report = {"workload": dataclasses.asdict(workload), "rounds": arguments.rounds}
        print(json.dumps({**report, **figures}))
    else:
        print(_report(workload, arguments.rounds, figures))
    return 0


def _workload(arguments: argparse.Namespace) -> Workload:
    is_latency = arguments.what == "latency"
    num_prompts = arguments.num_prompts if arguments.num_prompts is not None else 1 if is_latency else 64
    concurrency = (
        arguments.concurrency if arguments.concurrency is not None else 1 if is_latency else num_prompts
    )
    workload = Workload(num_prompts, arguments.input_len, arguments.output_len, concurrency, arguments.seed)
    counts = {**dataclasses.asdict(workload), "rounds": arguments.rounds}
    for name in ("num_prompts", "input_len", "output_len", "concurrency", "rounds"):
        if counts[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {counts[name]} is out of range, allowed is >= 1")
    return workload


class RoundBackend(GrpcBackend):
    """Sends a request again that a full server refuses. The clock runs on meanwhile: users would wait, too.

    Any other failure ends the round: no request is sent after it.
    """

    failure: TriptychError | None = None
    """The first failure. None: there is none."""

    async def answer(self, request: LoadRequest, on_piece: Callable[[], None]) -> TokenCounts:
        while self.failure is None:
            try:
                return await super().answer(request, on_piece)
            except QueueFull as error:
                await asyncio.sleep(error.retry_after_s)
            except TriptychError as error:
                self.failure = self.failure or error
        raise self.failure


async def _measure(frontend: Frontend, workload: Workload, num_rounds: int) -> list[LoadSummary]:
    """Run one short request, and then the rounds."""
    rounds = []
    async with frontend.open_client() as client:
        vocab_size = (await client.list_models())[0].vocab_size
        backend = RoundBackend(client, _SAMPLING, "")
        warm_up = dataclasses.replace(
            workload, num_prompts=1, output_len=min(workload.output_len, _WARM_UP_LEN)
        )
        await run_round(backend, warm_up, vocab_size, 0)
        for number in range(1, num_rounds + 1):
            rounds.append(await run_round(backend, workload, vocab_size, number))
            rate, seconds = rounds[-1].output_tokens_per_s, rounds[-1].duration_s
            print(f"round: {rate:.1f} output tokens/s in {seconds:.2f} s", file=sys.stderr)
    return rounds


async def run_round(
    backend: RoundBackend, workload: Workload, vocab_size: int, round_number: int
) -> LoadSummary:
    """Run one round.

    Raises:
        TriptychError: The first failure of a request.
    """
    generator = np.random.default_rng([workload.seed, round_number])
    lengths = Lengths(workload.input_len), Lengths(workload.output_len)
    requests = draw_random(workload.num_prompts, *lengths, vocab_size, generator)
    result = await run_load(backend, requests, None, workload.concurrency)
    if backend.failure is not None:
        raise backend.failure
    return summarize(result, (50, 99), {})


def medians(rounds: Sequence[LoadSummary]) -> dict[str, float]:
    """Return the median of each figure over the rounds; percentiles are taken within a round."""

    def median(figure: Callable[[LoadSummary], float]) -> float:
        return statistics.median(map(figure, rounds))

    return {
        "output_tokens_per_s": median(lambda one: one.output_tokens_per_s),
        "total_tokens_per_s": median(lambda one: one.total_tokens_per_s),
        "wall_s": median(lambda one: one.duration_s),
        "ttft_p50_ms": median(lambda one: one.ttft_ms.percentiles["p50"]),
        "ttft_p99_ms": median(lambda one: one.ttft_ms.percentiles["p99"]),
        "itl_p50_ms": median(lambda one: one.itl_ms.percentiles["p50"]),
        "itl_p99_ms": median(lambda one: one.itl_ms.percentiles["p99"]),
    }


def _report(workload: Workload, num_rounds: int, figures: dict[str, float]) -> str:
    return "\n".join(
        (
            f"{workload.num_prompts} x {workload.input_len} tokens in, {workload.output_len} out, "
            f"{workload.concurrency} at once; medians over rounds: {num_rounds}",
            f"output      {figures['output_tokens_per_s']:10.1f} tokens/s",
            f"total       {figures['total_tokens_per_s']:10.1f} tokens/s",
            f"TTFT        {figures['ttft_p50_ms']:10.1f} ms p50  {figures['ttft_p99_ms']:10.1f} ms p99",
            f"ITL         {figures['itl_p50_ms']:10.1f} ms p50  {figures['itl_p99_ms']:10.1f} ms p99",
            f"round       {figures['wall_s']:10.2f} s",
        )
    )
