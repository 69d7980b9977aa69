"""Rounds of equal requests over gRPC, with a fixed number in flight. Figures are medians over the rounds.

Prompts are random token ids of a fixed seed, other ones in each round, so that no prefix is found cached.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys

from triptych.cli.access import Frontend, add_address_argument
from triptych.cli.stack import stack_to_measure
from triptych.client.bench import Round, Summary, Workload, measure, summarize
from triptych.config.loader import add_config_flags
from triptych.errors import ConfigError


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
        summary = asyncio.run(_measure(frontend, workload, arguments.rounds))
    if arguments.json:
        report = {"workload": dataclasses.asdict(workload), "rounds": arguments.rounds}
        print(json.dumps({**report, **dataclasses.asdict(summary)}))
    else:
        print(_report(workload, arguments.rounds, summary))
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


async def _measure(frontend: Frontend, workload: Workload, num_rounds: int) -> Summary:
    def show(done: Round) -> None:
        rate = summarize([done]).output_tokens_per_s
        print(f"round: {rate:.1f} output tokens/s in {done.wall_s:.2f} s", file=sys.stderr)

    async with frontend.open_client() as client:
        return await measure(client, workload, num_rounds, show)


def _report(workload: Workload, num_rounds: int, summary: Summary) -> str:
    return "\n".join(
        (
            f"{workload.num_prompts} x {workload.input_len} tokens in, {workload.output_len} out, "
            f"{workload.concurrency} at once; medians over rounds: {num_rounds}",
            f"output      {summary.output_tokens_per_s:10.1f} tokens/s",
            f"total       {summary.total_tokens_per_s:10.1f} tokens/s",
            f"TTFT        {summary.ttft_p50_ms:10.1f} ms p50  {summary.ttft_p99_ms:10.1f} ms p99",
            f"ITL         {summary.itl_p50_ms:10.1f} ms p50  {summary.itl_p99_ms:10.1f} ms p99",
            f"round       {summary.wall_s:10.2f} s",
        )
    )
