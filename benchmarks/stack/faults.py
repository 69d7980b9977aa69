"""Breaks processes of a stack under streams, and says what their clients notice.

    python -m benchmarks.stack.faults failover                    an engine is killed; its streams move to the other one
    python -m benchmarks.stack.faults failover --victim worker    the same, by the loss of an engine's worker
    python -m benchmarks.stack.faults failover --freeze-s 3       the same, by an engine that stops for so long
    python -m benchmarks.stack.faults worker_killed               the only engine loses its worker
    python -m benchmarks.stack.faults frontend_death              a frontend is killed; clients go on at the next one
    python -m benchmarks.stack.faults engine_stops                first tokens after many short stops of an engine
    python -m benchmarks.stack.faults disconnect                  steps until the blocks of a client that left are free

Kills come at random moments, again and again, while every client sends its request anew when it has its answer. Each
token is compared with an undisturbed run, and the longest time between two pieces of a stream is taken. Clients are
those of tests/chaos; processes that were killed are started again at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.harness.command import ROOT, Measure, create_parser, run
from benchmarks.harness.figures import Figure
from tests.chaos.grounds.processes import ProcessGround, process_ground
from tests.chaos.recorder import Answer, Recorder, Request, Seen, answers_of
from tests.chaos.resuming_http import post_to, resume_over_http
from triptych.client.admin_client import AdminClient
from triptych.client.grpc_client import GenerationClient
from triptych.errors import EngineUnavailable
from triptych.internal.v1 import worker_pb2, worker_pb2_grpc
from triptych.rpc.channel import open_channel
from triptych.types.events import DeltaEvent, Event
from triptych.types.facts import Phase

_READY_S = 300.0
_POLL_S = 0.02
_RETRY_S = 0.05
_SETTLE_S = 0.5  # around a kill: streams go some tokens further, and the death is noticed
_SHAPES: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "n": 3},
)
_REAL = (
    "--simulation.enabled=false",
    "--model.dtype=float32",
    "--model.max-model-len=1024",
    "--model.batch-invariant=true",
    "--worker.num-threads=1",
)


@dataclass(slots=True)
class Run:
    """A run with kills, as its clients saw it. All times are of one clock."""

    expected: list[Seen]
    """History of the undisturbed run."""
    history: list[Seen]
    kills_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    """Seconds from each kill until what was killed serves again."""
    blocks_back_s: float | None = None
    """Seconds until no block is taken after a frontend and its clients have died together."""


class Stack:
    """A running stack, and the clients of its frontends."""

    def __init__(self, ground: ProcessGround, clients: Sequence[GenerationClient]) -> None:
        self.ground = ground
        self.engines = [member.name for member in ground.of_kind("enginecore")]
        self.admins = [AdminClient(member.address) for member in ground.of_kind("enginecore")]
        self.clients = clients
        self._frontends = ground.of_kind("frontend")

    def send(self, request: Request) -> AsyncGenerator[Event, None]:
        """Stream an answer, from a frontend that depends on the request, and from the next one if that dies."""
        place = len(request.prompt) % len(self.clients)
        if not request.http:
            return self.clients[place].generate(list(request.prompt), request.sampling)
        return resume_over_http(self._post, len(self.clients), place, request, attaches_twice=False)

    async def follow(self, request: Request, recorder: Recorder) -> None:
        """Stream an answer into the recorder; a request that is refused is sent again."""
        while await recorder.follow(request, self.send(request), asyncio.sleep):
            await asyncio.sleep(_RETRY_S)

    async def used_blocks(self) -> int:
        """Return the blocks that all engines hold."""
        statuses = [await admin.status() for admin in self.admins]
        return sum(status.num_used_blocks for ((_, status),) in statuses)

    async def wait_serving(self, name: str) -> None:
        """Return when a frontend takes requests, an engine has its worker, or a worker has its model."""
        kind, _, _ = name.partition("-")
        if kind == "frontend":
            await self.ground.wait_ready(name)
            return
        is_ready = self._has_worker if kind == "enginecore" else self._has_model
        async with asyncio.timeout(_READY_S):
            while not await is_ready(name):
                await asyncio.sleep(_POLL_S)

    async def restart(self, name: str) -> float:
        """Kill a process and start it again; return the seconds until it serves."""
        killed_s = time.monotonic()
        self.ground.signal(name, signal.SIGKILL)
        await self.ground.wait_ended(name)
        await self.ground.start(name)
        await self.wait_serving(name)
        restart_s = time.monotonic() - killed_s
        await self.wait_serving(name.replace("worker", "enginecore"))
        return restart_s

    async def freeze(self, name: str, seconds: float) -> None:
        """Stop a process for a while; its connections stay open."""
        self.ground.signal(name, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.ground.signal(name, signal.SIGCONT)

    async def _has_worker(self, engine: str) -> bool:
        try:
            return (await self.ground.status(engine)).ready
        except EngineUnavailable:
            return False

    async def _has_model(self, worker: str) -> bool:
        async with open_channel(self.ground.members[worker].address) as channel:
            try:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                response = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=0.5)
            except grpc.aio.AioRpcError:
                return False
        return response.info.phase == Phase.READY

    def _post(
        self, number: int, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        return post_to(f"127.0.0.1:{self._frontends[number].http_port}", headers, body)


@asynccontextmanager
async def running_stack(arguments: argparse.Namespace) -> AsyncIterator[Stack]:
    """Start the processes and wait until all engines serve; end them with the block."""
    terms = ("prefill_token_us", "decode_row_us", "context_token_ns")
    flags = [f"--simulation.{term.replace('_', '-')}=0" for term in terms] if arguments.only_base else []
    flags += [
        f"--simulation.base-ms={arguments.step_ms}",
        f"--scheduler.max-num-seqs={4 * arguments.streams}",
    ]
    flags += [f"--frontend.keep-s={arguments.keep_s}", f"--engine.resume-ttl-s={arguments.keep_s}"]
    flags += _REAL if arguments.real else ()
    with TemporaryDirectory() as directory:
        async with process_ground(
            Path(directory),
            build=arguments.build,
            num_engines=arguments.engines,
            num_frontends=arguments.frontends,
            worker=tuple(flags),
            enginecore=tuple(flags),
            frontend=tuple(flags),
        ) as ground:
            addresses = [member.address for member in ground.of_kind("frontend")]
            orders = [addresses[first:] + addresses[:first] for first in range(len(addresses))]
            stack = Stack(ground, [GenerationClient(",".join(order)) for order in orders])
            try:
                for name in stack.engines:
                    await stack.wait_serving(name)
                yield stack
            finally:
                await asyncio.gather(*(client.close() for client in stack.clients))
                await asyncio.gather(*(admin.close() for admin in stack.admins))


def requests_of(arguments: argparse.Namespace) -> list[Request]:
    """Return a request for each stream; behind several frontends every other one comes over HTTP."""

    def request(number: int) -> Request:
        rng = np.random.default_rng(number)
        prompt = rng.integers(1000, 40_000, rng.integers(24, 128)).tolist()
        fixed = {"max_tokens": arguments.tokens, "seed": number, "ignore_eos": True}
        http = "once" if arguments.frontends > 1 and number % 2 else ""
        shape = _SHAPES[number // 2 % len(_SHAPES)]
        return Request(str(number), tuple(prompt), {**fixed, **shape}, http=http)

    return [request(number) for number in range(arguments.streams)]


async def run_kills(arguments: argparse.Namespace) -> Run:
    """Run all streams once undisturbed, then again and again while processes are killed or frozen."""
    clock = time.monotonic
    requests, rng = requests_of(arguments), random.Random(arguments.seed)
    async with running_stack(arguments) as stack:
        quiet, recorder = Recorder(clock), Recorder(clock)
        await asyncio.gather(*(stack.follow(request, quiet) for request in requests))
        result = Run(quiet.history, recorder.history)
        is_over = asyncio.Event()

        async def repeat(request: Request) -> None:
            for attempt in itertools.count():
                if is_over.is_set():
                    return
                await stack.follow(replace(request, name=f"{request.name}/{attempt}"), recorder)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(repeat(request))
            for _ in range(arguments.kills):
                await asyncio.sleep(_SETTLE_S + rng.random() * arguments.tokens * arguments.step_ms / 1e3)
                num_victims = arguments.frontends if arguments.victim == "frontend" else arguments.engines
                name = f"{arguments.victim}-{rng.randrange(num_victims)}"
                result.kills_s.append(clock())
                if arguments.freeze_s:
                    await stack.freeze(name, arguments.freeze_s)
                    await asyncio.sleep(_SETTLE_S)
                    await stack.wait_serving(name)
                else:
                    result.restarts_s.append(await stack.restart(name))
            is_over.set()
        if arguments.victim == "frontend":
            result.blocks_back_s = await _orphan(stack, requests)
        return result


async def _orphan(stack: Stack, requests: Sequence[Request]) -> float:
    """Kill a frontend and its clients; return the seconds until the engines hold no block."""
    frontend = stack.ground.of_kind("frontend")[0]
    async with GenerationClient(frontend.address) as client:

        async def follow(request: Request) -> None:
            async for _ in client.generate(list(request.prompt), {"max_tokens": 2000, "ignore_eos": True}):
                pass

        tasks = [asyncio.create_task(follow(request)) for request in requests]
        while await stack.used_blocks() < len(tasks):
            await asyncio.sleep(_POLL_S)
        stack.ground.signal(frontend.name, signal.SIGKILL)
        killed_s = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    while await stack.used_blocks():
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - killed_s


def measure_kills(arguments: argparse.Namespace) -> Iterator[Figure]:
    kind = {"enginecore": "engine"}.get(arguments.victim, arguments.victim)
    what = f"freezes of {arguments.freeze_s:g} s" if arguments.freeze_s else "kills"
    title = f"{arguments.kills} {what} of {kind}s, {arguments.streams} streams"
    for _ in range(arguments.rounds):
        result = asyncio.run(run_kills(arguments))
        failed = [seen.error for seen in result.history if seen.what == "failed"]
        answers = answers_of(result.history)
        yield Figure(f"{title}: streams that failed", "", (len(failed),), note="; ".join(failed[:3]))
        num_tokens = sum(len(choice.token_ids) for one in answers.values() for choice in one.choices.values())
        note = f"{num_tokens} tokens of {len(answers)} streams"
        for name, count in differences(answers_of(result.expected), answers).items():
            yield Figure(f"{title}: tokens {name}", "", (count,), note=note)
        gaps_s = [float(np.diff(times).max()) for times in hit_streams(result)] or [0.0]
        quiet_s = [float(np.diff(times).max()) for times in output_times(result.expected).values()]
        yield Figure(f"{title}: streams hit", "", (len(gaps_s),))
        yield Figure(f"{title}: undisturbed: longest gap", "s", (max(quiet_s),))
        for name, value_s in (
            ("median", np.median(gaps_s)),
            ("p99", np.percentile(gaps_s, 99)),
            ("of all", max(gaps_s)),
        ):
            yield Figure(f"{title}: longest gap, {name}", "s", (float(value_s),))
        if result.restarts_s:
            yield Figure(f"{title}: longest restart, kill to serving", "s", (max(result.restarts_s),))
            if beyond_s := silences_beyond_restarts(result):
                name = f"{title}: silence beyond the restart, median"
                yield Figure(name, "s", (float(np.median(beyond_s)),))
        if result.blocks_back_s is not None:
            name = f"frontend and clients dead: blocks back (kept for {arguments.keep_s:g} s)"
            yield Figure(name, "s", (result.blocks_back_s,))


def differences(expected: Mapping[str, Answer], answers: Mapping[str, Answer]) -> dict[str, int]:
    """Return how many tokens of all answers are not those of the undisturbed ones."""
    found = dict.fromkeys(("changed", "lost", "repeated"), 0)
    for name, answer in answers.items():
        for index, choice in expected[name.partition("/")[0]].choices.items():
            others = answer.choices[index].token_ids if index in answer.choices else []
            found["changed"] += sum(a != b for a, b in zip(choice.token_ids, others, strict=False))
            found["lost"] += max(0, len(choice.token_ids) - len(others))
            found["repeated"] += max(0, len(others) - len(choice.token_ids))
    return found


def hit_streams(result: Run) -> list[list[float]]:
    """Return when output came of each stream that moved to another engine or, if none did, was in flight at a kill."""
    moved = {seen.request for seen in result.history if seen.num_moves}
    name_to_times = output_times(result.history)
    return [times for name, times in name_to_times.items() if name in moved] or [
        times
        for times in name_to_times.values()
        if any(times[0] < kill_s < times[-1] for kill_s in result.kills_s)
    ]


def silences_beyond_restarts(result: Run) -> list[float]:
    """Return how long after a restart the silence of each stream ended that it had hit, in seconds.

    Output may still come for a moment after a kill, so that its silence is its longest gap since.
    """
    beyond_s: list[float] = []
    for times in hit_streams(result):
        for kill_s, restart_s, next_s in zip(
            result.kills_s, result.restarts_s, [*result.kills_s[1:], np.inf], strict=True
        ):
            if not times[0] < kill_s < times[-1]:
                continue
            before_s = max(each for each in times if each <= kill_s)
            since = np.array([each for each in times if before_s <= each < next_s])
            if len(since) > 1:
                end_s = float(since[np.diff(since).argmax() + 1])
                beyond_s.append(end_s - (kill_s + restart_s))
    return beyond_s


def output_times(history: Sequence[Seen]) -> dict[str, list[float]]:
    """Return when output of each stream came, of those that have more than one piece."""
    times: dict[str, list[float]] = {}
    for seen in history:
        if seen.what == "delta":
            times.setdefault(seen.request, []).append(seen.at_s)
    return {name: of_stream for name, of_stream in times.items() if len(of_stream) > 1}


def measure_stops(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure first tokens before short stops of an engine, right after them, and 5 s later.

    A collection of garbage or a neighbour on the machine stops a process for some ms. The engine may then keep more
    steps in flight, all of which a new request waits for.
    """
    for _ in range(arguments.rounds):
        yield from asyncio.run(_first_tokens(arguments))


async def _first_tokens(arguments: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    median_ms: list[float] = []
    busy, probe = Request("busy", (300, 7, 9), {"max_tokens": 4096, "ignore_eos": True}), (301, 7, 9)
    async with running_stack(arguments) as stack:
        streaming = asyncio.create_task(_forever(lambda: stack.follow(busy, Recorder(time.monotonic))))
        moments = {"before": (0, 1.0), "after the stops": (arguments.kills, 0.0), "5 s later": (0, 5.0)}
        for when, (num_stops, pause_s) in moments.items():
            for _ in range(num_stops):
                await stack.freeze(stack.engines[0], arguments.freeze_s)
                await asyncio.sleep(_SETTLE_S)
            await asyncio.sleep(pause_s)
            seconds = [
                await _first_token_s(
                    stack, Request(str(number), probe, {"max_tokens": 4, "ignore_eos": True})
                )
                for number in range(arguments.streams)
            ]
            status = await stack.ground.status(stack.engines[0])
            median_ms.append(1e3 * float(np.median(seconds)))
            figures.append(Figure(f"{when}: steps in flight", "", (status.steps_in_flight,)))
            figures.append(Figure(f"{when}: first token, median", "ms", (median_ms[-1],)))
        streaming.cancel()
        await asyncio.wait([streaming])
    return [*figures, Figure("first token, later / before", "", (median_ms[-1] / median_ms[0],))]


async def _forever(begin: Callable[[], Any]) -> None:
    while True:
        await begin()


async def _first_token_s(stack: Stack, request: Request) -> float:
    """Return the seconds to a request's first token; wait for its end, and for a random part of a step."""
    sent_s, recorder = time.monotonic(), Recorder(time.monotonic)
    await stack.follow(request, recorder)
    await asyncio.sleep(0.05 * random.Random(request.name).random())
    return next(seen.at_s for seen in recorder.history if seen.what == "delta") - sent_s


def measure_disconnects(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure how long blocks stay taken after a client has left, by asking the engine all the time.

    The figure holds the time of one answer, too: about a millisecond.
    """
    yield from asyncio.run(_disconnects(arguments))


async def _disconnects(arguments: argparse.Namespace) -> list[Figure]:
    figures = []
    async with running_stack(arguments) as stack:
        for number, api in itertools.product(range(arguments.rounds + 1), ("http", "grpc")):
            sampling = {"max_tokens": 7_000, "ignore_eos": True}
            prompt = tuple(range(1000, 1200))
            request = Request("leaving", prompt, sampling, http="once" if api == "http" else "")
            async with aclosing(stack.send(request)) as events:
                deltas = 0
                while deltas < 3:
                    deltas += isinstance(await anext(events), DeltaEvent)
                if not await stack.used_blocks():
                    raise ValueError("the stream holds no blocks: there is nothing to measure")
                left_s = time.perf_counter()
            while await stack.used_blocks():
                pass
            steps = (time.perf_counter() - left_s) * 1e3 / arguments.step_ms
            if number:  # the first round is not counted
                figures.append(Figure(f"{api}: blocks are free after", "steps", (steps,)))
    return figures


FAULTS: dict[str, tuple[Measure, dict[str, Any]]] = {
    "failover": (measure_kills, {"victim": "enginecore", "engines": 2}),
    "worker_killed": (measure_kills, {"streams": 64, "kills": 3, "step_ms": 5.0, "only_base": False}),
    "frontend_death": (
        measure_kills,
        {"victim": "frontend", "engines": 2, "frontends": 3, "streams": 48, "step_ms": 20.0},
    ),
    "engine_stops": (measure_stops, {"kills": 8, "freeze_s": 0.15, "step_ms": 50.0, "streams": 20}),
    "disconnect": (measure_disconnects, {"rounds": 20, "step_ms": 20.0}),
}
"""Name -> how it is measured, and its defaults where they differ from those of all."""
_DEFAULTS = {
    "victim": "worker", "kills": 5, "freeze_s": 0.0, "engines": 1, "frontends": 1, "streams": 32, "tokens": 200,
    "step_ms": 10.0, "keep_s": 10.0, "seed": 0, "rounds": 1, "only_base": True, "build": ROOT, "real": False,
}  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    how, defaults = FAULTS[arguments.fault]
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return how(argparse.Namespace(**{**_DEFAULTS, **defaults, **given}))


if __name__ == "__main__":
    parser = create_parser(__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--victim", choices=("enginecore", "worker", "frontend"))
    parser.add_argument("--freeze-s", type=float, help="freeze the victim for so long instead of a kill")
    parser.add_argument("--step-ms", type=float, help="of the simulated worker")
    parser.add_argument("--keep-s", type=float, help="as frontend.keep_s")
    parser.add_argument("--tokens", type=int, help="of each choice")
    parser.add_argument(
        "--build", type=Path, metavar="DIR", help="run the services of this checkout (default: ours)"
    )
    for name, text in {
        "kills": "or stops, one after the other",
        "engines": "each with a worker",
        "frontends": "behind several, every other client is one of HTTP",
        "streams": "at once; of engine_stops: first tokens that are measured at a time",
        "seed": "of victims and moments",
        "rounds": "each with a stack of its own, but of disconnect",
    }.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument(
        "--real", action="store_true", help="the embedded model in float32, one thread a worker"
    )
    sys.exit(run(parser, measure))
