"""Measures the longest gap of streams while long prompts arrive: one engine prefills for the other, or both mix.

Two workers and two engines in either case, with a frontend, all processes of their own. The model is simulated, with
its times and without its weights, unless real weights are asked for. Long prompts arrive one after the other, each as
soon as the one before has its first token. A pulled block of a simulated worker holds little, so what the transfer of
real blocks costs is measured with real weights only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from tests.chaos.grounds.processes import ProcessGround
from triptych.client.grpc_client import GenerationClient
from triptych.config import SimulationConfig
from triptych.types.events import DeltaEvent, FinishedEvent

DEADLINE_S = 600.0
_POLL_S = 0.05
_ROLES = {"mixed": ("both", "both"), "disaggregated": ("prefill", "decode")}


@dataclass(slots=True)
class Stream:
    """One client's answer: when its tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0

    async def follow(
        self, client: GenerationClient, prompt: Sequence[int], num_tokens: int, seed: int
    ) -> None:
        sampling: dict[str, Any] = {
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "seed": seed,
        }
        async for event in client.generate(list(prompt), sampling, timeout_s=DEADLINE_S):
            if isinstance(event, DeltaEvent):
                self.times_s.append(time.monotonic())
                self.token_ids += event.token_ids
            elif isinstance(event, FinishedEvent):
                self.num_cached_tokens = event.usage.num_cached_tokens

    def gaps_s(self, since_s: float, until_s: float) -> np.ndarray:
        """Return the times between tokens that came in an interval."""
        times = np.array(self.times_s)
        return np.diff(times[(times >= since_s) & (times <= until_s)])


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    options = [f"--model.model={arguments.model}", "--scheduler.max-num-seqs=64"]
    options.append(f"--scheduler.max-num-batched-tokens={arguments.budget}")
    if arguments.real:
        options += ["--simulation.enabled=false", "--model.dtype=float32", "--worker.num-threads=1"]
        options.append(f"--cache.num-blocks={arguments.blocks}")
    else:
        times = SimulationConfig()
        options += [
            f"--simulation.{name.replace('_', '-')}={arguments.slowdown * getattr(times, name)}"
            for name in ("base_ms", "prefill_token_us", "decode_row_us", "context_token_ns")
        ]
    title = f"{arguments.streams} streams, prompts of {arguments.prompt_tokens} tokens"
    for _ in range(arguments.rounds):
        longest: dict[str, float] = {}
        answers: dict[str, list[list[int]]] = {}
        for name, roles in _ROLES.items():
            streams, prompts, gaps_s = asyncio.run(_run(roles, options, arguments))
            longest[name] = float(gaps_s.max())
            answers[name] = [stream.token_ids for stream in (*streams, *prompts)]
            yield Figure(f"{title}, {name}: longest silence", "ms", (1e3 * longest[name],))
            yield Figure(f"{title}, {name}: 99th percentile", "ms", (1e3 * float(np.percentile(gaps_s, 99)),))
            waits = [stream.times_s[0] for stream in prompts]
            yield Figure(f"{title}, {name}: first token of a long prompt", "s", (float(np.median(waits)),))
            num_pulled = sum(stream.num_cached_tokens > 0 for stream in prompts)
            yield Figure(
                f"{title}, {name}: long prompts pulled", "", (num_pulled,), note=f"of {len(prompts)}"
            )
        ratio = longest["disaggregated"] / longest["mixed"]
        yield Figure(f"{title}: longest silence, disaggregated to mixed", "", (ratio,))
        num_different = sum(a != b for a, b in zip(answers["mixed"], answers["disaggregated"], strict=True))
        error = f"{num_different} answers differ" if num_different else ""
        yield Figure(f"{title}: answers that differ", "", (num_different,), error=error)


async def _run(
    roles: Sequence[str], options: Sequence[str], arguments: argparse.Namespace
) -> tuple[list[Stream], list[Stream], np.ndarray]:
    """Load two workers with an engine each, of these roles, and a frontend."""
    kind_to_flags = {"worker": ("--worker.kv-transfer=true", "--worker.kv-transfer-port=0", *options)}
    kind_to_flags |= {f"enginecore-{place}": (f"--engine.role={role}",) for place, role in enumerate(roles)}
    kind_to_flags |= {"enginecore": tuple(options), "frontend": tuple(options)}
    with TemporaryDirectory() as folder:
        ground = ProcessGround(Path(folder), num_engines=len(roles), num_frontends=1, options=kind_to_flags)
        try:
            for name in ground.members:
                await ground.start(name)
            await ground.wait_ready("frontend-0")
            return await _load(ground.members["frontend-0"].address, arguments)
        finally:
            await ground.end_all()


async def _load(address: str, arguments: argparse.Namespace) -> tuple[list[Stream], list[Stream], np.ndarray]:
    """Run streams, then long prompts beside them.

    Returns:
        The streams, the long prompts, with the seconds to their first token as their first time, and the times between
        tokens of the streams while the long prompts came.
    """
    rng = np.random.default_rng(1)
    streams = [Stream() for _ in range(arguments.streams)]
    prompts = [Stream() for _ in range(arguments.prompts)]
    async with GenerationClient(address) as client:
        await _wait_ready(client)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(
                    stream.follow(client, rng.integers(1000, 40_000, 32).tolist(), arguments.tokens, number)
                )
                for number, stream in enumerate(streams)
            ]
            while any(len(stream.token_ids) < 40 for stream in streams):
                await asyncio.sleep(_POLL_S)
            since_s = time.monotonic()
            for number, stream in enumerate(prompts):
                ids = rng.integers(1000, 40_000, arguments.prompt_tokens).tolist()
                sent_s = time.monotonic()
                await stream.follow(client, ids, 1, number)
                stream.times_s[0] -= sent_s
            until_s = time.monotonic()
            if any(task.done() for task in running):
                raise RuntimeError("streams have ended before the prompts: raise --tokens")
    gaps_s = np.concatenate([stream.gaps_s(since_s, until_s) for stream in streams])
    return streams, prompts, gaps_s


async def _wait_ready(client: GenerationClient) -> None:
    """Wait until both engines answer: requests that come before would go to one of them."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            warm_up = [Stream() for _ in range(8)]
            async with asyncio.TaskGroup() as group:
                for number, stream in enumerate(warm_up):
                    group.create_task(stream.follow(client, [1000 + number] * 64, 20, number))
            await asyncio.sleep(1.0)
            return
        except* Exception:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    parser = create_parser(__doc__, rounds=3)
    parser.add_argument("--model", default="embedded")
    parser.add_argument(
        "--real", action="store_true", help="compute real weights, with one thread per worker"
    )
    parser.add_argument(
        "--blocks", type=int, default=1500, help="KV blocks of each real worker (default: 1500)"
    )
    parser.add_argument(
        "--slowdown",
        type=float,
        default=4.0,
        help="factor of the simulated times, so that a machine with few cores keeps up (default: 4)",
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream (default: 1000)")
    parser.add_argument("--prompts", type=int, default=8, help="long prompts (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step (default: 2048)")
    sys.exit(run(parser, measure))
