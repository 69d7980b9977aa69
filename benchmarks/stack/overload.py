"""Measures a server under overload: good answers per second beside its capacity.

An open loop over HTTP: completions are sent at a fixed rate, however many are under way. The worker is simulated, with
steps of 30 ms. 36 requests of 30 tokens run at once, which is 40 requests per second, and 128 may wait. A refused
request counts as refused well if it is a 429 with Retry-After. Refused requests are not sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.harness.cluster import running, simulated_config
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from triptych.client.http_client import HttpClient
from triptych.client.load.backends import COMPLETIONS, TokenCounts
from triptych.client.load.datasets import LoadRequest
from triptych.client.load.run import RequestRecord, run_load
from triptych.errors import TriptychError

STEP_MS = 30.0
NUM_RUNNING = 36
NUM_WAITING = 128
OUTPUT_LEN = 30
PROMPT_CHARS = 2000
CAPACITY = NUM_RUNNING / (OUTPUT_LEN * STEP_MS / 1e3)
"""Requests per second."""
FILL_S = 6.0
"""Time until the queue is full and the first that waited have ended."""
REFUSED = "refused with Retry-After"


class WholeAnswers:
    """A backend of completions that come whole."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def answer(self, request: LoadRequest, on_piece: Callable[[], None]) -> TokenCounts:
        body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "ignore_eos": True}
        answer = await self._client.post(COMPLETIONS, json.dumps(body).encode())
        if answer.status == 429 and int(answer.headers.get("retry-after", 0)) > 0:
            raise TriptychError(REFUSED)
        if answer.status != 200:
            raise TriptychError(str(answer.status))
        return TokenCounts(0, OUTPUT_LEN)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    config = simulated_config(
        STEP_MS, max_num_seqs=NUM_RUNNING, max_num_waiting=NUM_WAITING, max_num_batched_tokens=32768
    )
    for _ in range(arguments.rounds):
        with running(config) as cluster, ProcessPoolExecutor(1) as client:  # a process of its own
            url = f"http://{cluster.http_address}"
            records = client.submit(offer, url, arguments.rate, arguments.seconds).result()
        outcomes = Counter(record.error for record in records)
        refusals_ms = [1e3 * (one.ended_s - one.due_s) for one in records if one.error == REFUSED]
        yield Figure("good answers", "1/s", (outcomes.pop("", 0) / arguments.seconds,), limit=CAPACITY)
        yield Figure("refused with 429 and Retry-After", "", (outcomes.pop(REFUSED, 0),))
        for percent in (50, 99):
            refusal_ms = float(np.percentile(refusals_ms or [0.0], percent))
            yield Figure(f"time to a refusal, p{percent}", "ms", (refusal_ms,))
        yield Figure("other outcomes", "", (outcomes.total(),), note=str(dict(outcomes) or ""))


def offer(url: str, rate: float, seconds: float) -> list[RequestRecord]:
    """Send requests at a rate, and return those that ended after the queue had filled and before the last was sent."""
    prompt = " ".join(["word"] * (PROMPT_CHARS // 5))
    until_s = FILL_S + seconds
    arrivals_s = np.arange(0.0, until_s, 1 / rate).tolist()
    requests = [LoadRequest(f"{number} {prompt}", OUTPUT_LEN) for number in range(len(arrivals_s))]

    async def send() -> list[RequestRecord]:
        async with HttpClient(url) as client:
            return (await run_load(WholeAnswers(client), requests, arrivals_s, None)).records

    return [record for record in asyncio.run(send()) if FILL_S <= record.ended_s < until_s]


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second (default: 200)")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after the queue has filled")
    sys.exit(run(parser, measure))
