"""Measures what a request's way to an engine costs in the frontend's router, by the number of engines.

All that a request does in `Router`: its model is found, free places are checked, its prompt is hashed, an engine is
chosen, and the prompt is booked there. The engines are alike, have reported different loads, and each caches blocks of
others' prompts. Every other prompt begins with 256 tokens that one engine in ten caches. Before each request some
engines report their loads, which counts apart. No engine runs, and nothing is sent. CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure, distribution
from benchmarks.routing.simulation import create_facts
from triptych.prefix_hash import describe_hash, hash_blocks, root_of_request
from triptych.types.facts import ModelFacts
from triptych.types.outputs import CacheNews, LoadReport, OutputBatch
from triptych.types.step import U32
from triptych.types.submit import EngineLimits, EngineWelcome, RequestNeeds
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import EngineSession
from triptych_services.frontend.routing.prefix_index import PrefixIndex
from triptych_services.frontend.routing.router import Router

BLOCK_SIZE = 16
PREFIX_LEN = 256
_CACHED_BLOCKS = 2000  # of each engine; a table of 4,096 homes is half full
_PREFIX_SHARE = 10
_BOOKINGS_KEPT = 64
_VOCAB_SIZE = 50_000


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        for num_engines in arguments.engines:
            walks_us, reports_us = asyncio.run(walk_all(num_engines, arguments))
            title = f"{num_engines:,} engines"
            yield from distribution(f"{title}: walk of a request", "us", walks_us)
            yield from distribution(f"{title}: an engine's report is taken in", "us", reports_us)


async def walk_all(num_engines: int, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the microseconds of each request's walk, and of each engine's report. Engine clients need a loop."""
    generator = np.random.default_rng(0)
    prefix = _draw_tokens(generator, PREFIX_LEN)
    _, facts = create_facts()
    index = PrefixIndex()
    engines = [
        connected_engine(number, facts.model, prefix, generator, index) for number in range(num_engines)
    ]
    router = Router()
    router.engines = engines
    walks_us: list[float] = []
    reports_us: list[float] = []
    booked: list[tuple[EngineClient, int]] = []
    for number in range(arguments.requests):
        for index in generator.integers(0, num_engines, arguments.reports).tolist():
            batch = OutputBatch(1, load=_draw_report(generator))
            started_ns = time.thread_time_ns()
            engines[index].load.note_batch(batch)
            reports_us.append((time.thread_time_ns() - started_ns) / 1e3)
        tokens = _draw_tokens(generator, arguments.prompt_len)
        if number % 2:
            tokens[:PREFIX_LEN] = prefix[: len(tokens)]
        started_ns = time.thread_time_ns()
        engine = walk(router, tokens, number + 1)
        walks_us.append((time.thread_time_ns() - started_ns) / 1e3)
        booked.append((engine, number + 1))
        if len(booked) > _BOOKINGS_KEPT:
            ended, ended_number = booked.pop(0)
            ended.load.cancel(ended_number)
    return walks_us, reports_us


def walk(router: Router, tokens: U32, number: int) -> EngineClient:
    """Choose an engine for a request, and book it there as the first choice of this number."""
    terms = router.find("")
    router.check_free_places("", 0, "tenant")
    prompt = router.read_prompt(terms, tokens, "")
    engine = router.choose(terms, RequestNeeds(len(tokens) + 128), prompt=prompt)
    engine.load.book([number], len(tokens), prompt)
    return engine


def connected_engine(
    number: int, model: ModelFacts, prefix: U32, generator: np.random.Generator, index: PrefixIndex
) -> EngineClient:
    """Return a client as it is after its engine has sent a welcome, a load and news of its cache."""
    engine = EngineClient(f"127.0.0.1:{number + 1}", frontend_id="walk", boot_id="walk")
    told = describe_hash(BLOCK_SIZE)
    limits = EngineLimits(True, 1024, max_running=64)
    engine.welcome = EngineWelcome(f"engine-{number}", True, model=model, limits=limits, prefix_hash=told)
    session = EngineSession("walk", index=index)
    engine._session, engine._is_connected = session, True  # as its stream would
    session.load.note_hash(told)
    stored = [generator.bytes(BLOCK_SIZE) for _ in range(_CACHED_BLOCKS)]
    if number % _PREFIX_SHARE == 0:
        stored += hash_blocks(root_of_request(""), prefix.tobytes(), BLOCK_SIZE)
    news = CacheNews(stored=b"".join(stored))
    session.load.note_batch(OutputBatch(1, cache=news, load=_draw_report(generator)))
    return engine


def _draw_report(generator: np.random.Generator) -> LoadReport:
    return LoadReport(
        num_prefill_tokens=int(generator.integers(0, 4000)),
        num_running=int(generator.integers(20, 64)),
        num_waiting=0,
        num_free_blocks=1000,
        num_free_rows=int(generator.integers(0, 8)),
        prefill_token_s=float(generator.uniform(0.9e-4, 1.1e-4)),
        decode_step_s=float(generator.uniform(0.009, 0.011)),
        row_interval_s=0.05,
    )


def _draw_tokens(generator: np.random.Generator, num: int) -> U32:
    return generator.integers(0, _VOCAB_SIZE, num).astype(np.uint32)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument(
        "--engines", type=int, nargs="+", default=[1, 64, 1000], metavar="N", help="(default: 1 64 1000)"
    )
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="of a round (default: 400)")
    parser.add_argument(
        "--reports", type=int, default=20, metavar="N", help="of loads, before each request (default: 20)"
    )
    parser.add_argument("--prompt-len", type=int, default=512, metavar="N", help="tokens (default: 512)")
    sys.exit(run(parser, measure))
