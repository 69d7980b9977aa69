"""Kills engines at random moments under streams, and compares what clients get with an undisturbed run.

Every token of each stream is compared, and the time between two of its tokens is taken. Engines that were killed are
started again; the next kill comes when all serve.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.fleet import Fleet, running_fleet
from triptych.client.grpc_client import GenerationClient
from triptych.errors import TriptychError
from triptych.types.events import DeltaEvent, FinishedEvent

DEADLINE_S = 600.0
_SETTLE_S = 0.5  # between two kills, beside the restart: streams go some tokens further


@dataclass(slots=True)
class Stream:
    """One client's answer."""

    number: int
    choices: dict[int, list[int]] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    num_moves: int = 0
    is_exact: bool = True
    error: str = ""

    async def follow(self, client: GenerationClient, arguments: argparse.Namespace) -> None:
        """Send the request of this number, and read its answer."""
        rng = np.random.default_rng(self.number)
        prompt = rng.integers(1000, 40_000, rng.integers(24, 128)).tolist()
        sampling: dict[str, Any] = {
            "temperature": float(self.number % 4 > 0),
            "n": 3 if self.number % 4 == 3 else 1,
            "seed": self.number,
            "max_tokens": arguments.tokens,
            "ignore_eos": True,
        }
        if self.number % 4 == 2:
            sampling |= {"presence_penalty": 0.5, "logprobs": 1}
        last_s = time.monotonic()
        try:
            async for event in client.generate(prompt, sampling, timeout_s=DEADLINE_S):
                now_s = time.monotonic()
                if isinstance(event, DeltaEvent):
                    if self.choices:
                        self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                    last_s = now_s
                    self.choices.setdefault(event.index, []).extend(event.token_ids)
                elif isinstance(event, FinishedEvent):
                    self.num_moves, self.is_exact = event.num_moves, event.is_exact
        except TriptychError as error:
            self.error = f"{error.code}: {error.message}"


@dataclass(slots=True)
class Differences:
    """Output tokens of all streams that are not those of the undisturbed run."""

    changed: int = 0
    lost: int = 0
    repeated: int = 0

    def add(self, expected: Stream, got: Stream) -> None:
        """Compare a stream with the undisturbed one of its number."""
        for index, tokens in expected.choices.items():
            others = got.choices.get(index, [])
            self.changed += sum(a != b for a, b in zip(tokens, others, strict=False))
            self.lost += max(0, len(tokens) - len(others))
            self.repeated += max(0, len(others) - len(tokens))


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    expected, streams, num_kills = asyncio.run(_measure(arguments))
    differences = Differences()
    for stream in streams:
        differences.add(expected[stream.number], stream)
    errors = [stream.error for stream in streams if stream.error]
    moved = [stream for stream in streams if stream.num_moves]
    what = f"freezes of {arguments.freeze_s:g} s" if arguments.freeze_s else "kills"
    title = f"{num_kills} {what} of {arguments.victim}s, {arguments.streams} streams"
    note = f"{sum(sum(map(len, s.choices.values())) for s in streams)} tokens of {len(streams)} streams"
    yield Figure(f"{title}: streams that failed", "", (len(errors),), note="; ".join(errors[:3]))
    for name in ("changed", "lost", "repeated"):
        yield Figure(f"{title}: tokens {name}", "", (getattr(differences, name),), note=note)
    yield Figure(f"{title}: streams that moved", "", (len(moved),))
    yield Figure(f"{title}: of them inexact", "", (sum(not stream.is_exact for stream in moved),))
    gaps_s = [stream.longest_gap_s for stream in moved]
    quiet_s = [stream.longest_gap_s for stream in expected.values()]
    for name, value_s in (
        ("undisturbed: longest gap", max(quiet_s)),
        ("moved streams: longest gap, median", float(np.median(gaps_s)) if gaps_s else 0.0),
        ("moved streams: longest gap, p99", float(np.percentile(gaps_s, 99)) if gaps_s else 0.0),
        ("moved streams: longest gap of all", max(gaps_s, default=0.0)),
    ):
        yield Figure(f"{title}: {name}", "s", (value_s,))


async def _measure(arguments: argparse.Namespace) -> tuple[dict[int, Stream], list[Stream], int]:
    """Return the undisturbed streams by number, the disturbed ones, and how many kills these have seen."""
    options = {"scheduler.max_num_seqs": str(4 * arguments.streams)}
    if arguments.real:
        options |= {"model.dtype": "float32", "model.max_model_len": "1024", "model.batch_invariant": "true"}
        options |= {"worker.num_threads": "1"}
    else:
        options |= {"simulation.enabled": "true", "simulation.base_ms": str(arguments.step_ms)}
        terms = ("prefill_token_us", "decode_row_us", "context_token_ns")
        options |= {f"simulation.{term}": "0" for term in terms}
    async with running_fleet(arguments.engines, options) as fleet, GenerationClient(fleet.address) as client:
        expected = {number: Stream(number) for number in range(arguments.streams)}
        await asyncio.gather(*(stream.follow(client, arguments) for stream in expected.values()))
        assert not any(stream.error for stream in expected.values()), "the undisturbed run has failed"
        streams: list[Stream] = []
        is_over = asyncio.Event()

        async def load(number: int) -> None:
            """Send the request of a number again and again."""
            while not is_over.is_set():
                streams.append(Stream(number))
                await streams[-1].follow(client, arguments)

        async with asyncio.TaskGroup() as group:
            for number in expected:
                group.create_task(load(number))
            num_kills = 0
            async for name in victims(fleet, arguments):
                if arguments.freeze_s:
                    await fleet.freeze(name, arguments.freeze_s)
                else:
                    fleet.kill(name)
                num_kills += 1
            is_over.set()
    return expected, streams, num_kills


async def victims(fleet: Fleet, arguments: argparse.Namespace) -> AsyncIterator[str]:
    """Yield who is killed next, when all engines serve and some time has passed."""
    rng = random.Random(arguments.seed)
    for _ in range(arguments.kills):
        await asyncio.sleep(_SETTLE_S + rng.random() * arguments.tokens * arguments.step_ms / 1e3)
        number = rng.randrange(arguments.engines)
        yield f"{arguments.victim}-{number}"
        await asyncio.sleep(_SETTLE_S)  # else it may not have been noticed
        await fleet.wait_ready(number)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--victim", choices=("engine", "worker"), default="engine")
    parser.add_argument("--freeze-s", type=float, default=0.0, help="freeze for so long instead of a kill")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of each choice (default: 200)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the simulated worker (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="two engines of the embedded model in float32")
    sys.exit(run(parser, measure))
