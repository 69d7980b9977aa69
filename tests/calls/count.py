"""Counts the project's Python calls per engine step, per streamed token and per request, and holds them to marks.

A count needs no quiet machine: the same code gives the same number. So what slips into a hot path is seen when it is
made, where a time would drown in the noise of the machine. `marks.toml` has the marks and their reasons.

    python -m tests.calls.count
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.engine.requests import (
    BLOCK_SIZE,
    PROMPT_LEN,
    VOCAB_SIZE,
    blocks_of,
    decoding_submits,
    submit_of,
    worker_facts,
)
from tests.helpers.byte_tokenizer import byte_tokenizer
from triptych.config import EngineConfig, SchedulerConfig
from triptych.internal.v1 import engine_core_pb2, step_pb2
from triptych.observe.metrics import FrontendMetrics
from triptych.types.facts import ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.outputs import FinishedRequest, FinishReason, OutputBatch, StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult
from triptych.types.submit import EngineWelcome, RequestHead, SubmitRequest
from triptych.v1 import generation_pb2
from triptych.wire.engine_core import outputs_from_proto, outputs_to_proto, submit_from_proto, submit_to_proto
from triptych.wire.generation import EventEncoder
from triptych.wire.result import result_from_proto, result_to_proto
from triptych.wire.step import plan_to_proto
from triptych_services.enginecore.engine import EngineCore
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import EngineSession, OutputSink
from triptych_services.frontend.generate import Generator
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator

ROOT = Path(__file__).resolve().parents[2]
MARKS = Path(__file__).with_name("marks.toml")
SOURCES = tuple(f"{ROOT / folder}/" for folder in ("libs", "services"))
NUM_ROWS = 256
NUM_STREAMS = 64
NUM_SHOWN = 12
TICK_S = 0.002
STOP = ("\n\nUser:", "###", "Observation:")
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # by Python 3.12


class Calls:
    """Calls of functions in the project's sources while `counting`, also each time that a generator goes on."""

    def __init__(self) -> None:
        self.by_code: Counter[CodeType] = Counter()

    def __len__(self) -> int:
        return self.by_code.total()

    @contextmanager
    def counting(self) -> Iterator[None]:
        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(SOURCES) and code.co_name not in _INLINED:
                self.by_code[code] += 1

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def most(self, divisor: int) -> Iterator[str]:
        """Yield the functions that are called most, with their calls divided by `divisor`."""
        for code, count in self.by_code.most_common(NUM_SHOWN):
            place = Path(code.co_filename).relative_to(ROOT)
            yield f"{count / divisor:8.2f}  {place}:{code.co_firstlineno} {code.co_qualname}"


def count_engine_step() -> tuple[Calls, int]:
    """Count decode steps of 256 rows: each crosses a border of blocks once in the 16 steps."""
    num_steps, warm_up = BLOCK_SIZE, 2 * BLOCK_SIZE
    max_model_len = PROMPT_LEN + BLOCK_SIZE + warm_up + num_steps + 8
    engine = create_engine(NUM_ROWS, max_model_len)
    for submit in decoding_submits(NUM_ROWS, SamplingParams(max_tokens=None)):
        engine.frontends.submit(1, submit)
    for _ in range(warm_up):
        step(engine, Calls())
    calls = Calls()
    for _ in range(num_steps):
        step(engine, calls)
    return calls, num_steps


def count_engine_request() -> tuple[Calls, int]:
    """Count a request of one token in an engine that has no other."""
    engine = create_engine(NUM_ROWS, 1024)
    num_requests, calls = 16, Calls()
    for number in range(2 * num_requests):
        counted = calls if number >= num_requests else Calls()
        message = submit_to_proto(submit_of(number + 1, 40, SamplingParams(max_tokens=1))).SerializeToString()
        with counted.counting():
            engine.frontends.submit(1, submit_from_proto(engine_core_pb2.Submit.FromString(message)))
        step(engine, counted)
        assert not engine.num_requests, "a request of one token has not ended with its step"
    return calls, num_requests


def create_engine(max_num_seqs: int, max_model_len: int) -> EngineCore:
    """Return an engine with a session 1 and a worker, which `step` is."""
    budget = max_num_seqs * (PROMPT_LEN + BLOCK_SIZE)
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_num_waiting=max_num_seqs
    )
    ticks = itertools.count()  # a real clock would make what is due depend on the machine
    engine = EngineCore(EngineConfig(scheduler=scheduler), lambda: next(ticks) * TICK_S)
    facts = worker_facts(
        num_blocks=blocks_of(max_num_seqs, max_model_len),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    engine.worker_ready(facts, after_crash=False)
    engine.frontends.open_session(1)
    return engine


def step(engine: EngineCore, calls: Calls) -> None:
    """Plan a step and take in its result and what the frontends get, with all messages."""
    with calls.counting():
        plan = engine.plan()
        assert plan is not None, "nothing to compute"
        plan_to_proto(plan).SerializeToString()
    num_rows = engine.num_requests
    tokens = np.random.default_rng(plan.step_id).integers(3, VOCAB_SIZE, num_rows, dtype=np.uint32)
    message = result_to_proto(StepResult(plan.step_id, tokens)).SerializeToString()
    with calls.counting():
        engine.apply(result_from_proto(step_pb2.Result.FromString(message)))
        for batch in engine.take_outputs().values():
            outputs_to_proto(batch).SerializeToString()


class LocalEngine(EngineClient):
    """An engine client without an engine: `put` brings what one would send."""

    def __init__(self, model: ModelFacts) -> None:
        super().__init__("127.0.0.1:1", frontend_id="f", boot_id="b")
        self.welcome = EngineWelcome("engine", ready=True, model=model)
        self._session, self._is_connected = EngineSession("s"), True
        self.numbers: list[int] = []
        self._last_batch = 0

    def submit(
        self,
        create: Callable[[Sequence[int]], SubmitRequest],
        sinks: Sequence[OutputSink],
        prompt: RoutedPrompt | None = None,
    ) -> Sequence[int]:
        def encoded(numbers: Sequence[int]) -> SubmitRequest:
            request = create(numbers)
            submit_to_proto(request).SerializeToString()
            return request

        numbers = super().submit(encoded, sinks, prompt)
        self.numbers += numbers
        return numbers

    def put(self, *, calls: Calls, finish: FinishReason | None = None, **columns: np.ndarray) -> None:
        assert self._session is not None
        self._last_batch += 1
        ends = (
            ()
            if finish is None
            else tuple(
                FinishedRequest(number, finish, None, 0, StageTimings(1, 1, 1)) for number in self.numbers
            )
        )
        batch = OutputBatch(self._last_batch, finished=ends, **columns)
        message = outputs_to_proto(batch).SerializeToString()
        with calls.counting():
            self._session.take_in(outputs_from_proto(engine_core_pb2.OutputBatch.FromString(message)), 0)


async def stream(
    num_streams: int, num_tokens: int, calls_of_tokens: Calls, calls_of_ends: Calls, stop: Sequence[str] = ()
) -> None:
    """Stream some answers of a frontend, a token of each at a time."""
    vocab_size = 300
    engine = LocalEngine(ModelFacts("m", ModelIdentity("0" * 64), vocab_size, 1024, (), "f", "f", "none"))
    router, metrics = Router({}), FrontendMetrics.create(CollectorRegistry())
    router.engines = [engine]
    generator = Generator(router, metrics, Migrator(router, metrics, MigrationTerms(policy="never")))
    generator.set_text_model(TextModel(byte_tokenizer(), {}, ROOT))

    async def read(number: int) -> None:
        sampling = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number, "stop": list(stop)}
        raw = RawRequest(
            api="grpc", prompt="Hello the world", head=RequestHead(f"r{number}"), sampling=sampling
        )
        encoder = EventEncoder(generation_pb2.ResponseOptions())
        async with aclosing(generator.generate(raw)) as events:
            async for event in events:
                for message in encoder.encode(event):
                    message.SerializeToString()

    async def settle(calls: Calls) -> None:
        with calls.counting():
            for _ in range(20):  # turns of the loop: more than any of these takes
                await asyncio.sleep(0)

    readers = [asyncio.create_task(read(number)) for number in range(num_streams)]
    await settle(calls_of_ends)
    failed = [reader.exception() for reader in readers if reader.done()]
    assert len(engine.numbers) == num_streams, f"a request was not submitted at once; {failed[:1]}"
    numbers = np.array(engine.numbers, np.uint32)
    engine.put(calls=calls_of_ends, admitted=numbers)
    await settle(calls_of_ends)
    for token in range(num_tokens):
        token_ids = np.full(num_streams, 40 + token % 50, np.uint32)
        first = {} if token else {"first_numbers": numbers, "first_cached_tokens": np.zeros_like(numbers)}
        engine.put(calls=calls_of_tokens, numbers=numbers, token_ids=token_ids, **first)
        await settle(calls_of_tokens)
    engine.put(calls=calls_of_ends, finish=FinishReason.LENGTH)
    await settle(calls_of_ends)
    assert all(reader.done() and reader.exception() is None for reader in readers), "a stream has not ended"


def count_streamed_token() -> tuple[Calls, int]:
    """Count a token of each of 64 streams over gRPC, from the engine's message to the client's."""
    num_tokens, calls = 20, Calls()
    asyncio.run(stream(NUM_STREAMS, 2, Calls(), Calls()))
    asyncio.run(stream(NUM_STREAMS, num_tokens, calls, Calls()))
    return calls, NUM_STREAMS * num_tokens


def count_stopped_token() -> tuple[Calls, int]:
    """Count the same where the request has stop strings."""
    num_tokens, calls = 20, Calls()
    asyncio.run(stream(NUM_STREAMS, 2, Calls(), Calls(), STOP))
    asyncio.run(stream(NUM_STREAMS, num_tokens, calls, Calls(), STOP))
    return calls, NUM_STREAMS * num_tokens


def count_frontend_request() -> tuple[Calls, int]:
    """Count what a streamed request over gRPC costs a frontend beside its tokens."""
    calls = Calls()
    asyncio.run(stream(NUM_STREAMS, 2, Calls(), Calls()))
    asyncio.run(stream(NUM_STREAMS, 1, Calls(), calls))
    return calls, NUM_STREAMS


COUNTS: dict[str, Callable[[], tuple[Calls, int]]] = {
    "engine_step": count_engine_step,
    "engine_request": count_engine_request,
    "streamed_token": count_streamed_token,
    "stopped_token": count_stopped_token,
    "frontend_request": count_frontend_request,
}


def main() -> int:
    marks = tomllib.loads(MARKS.read_text())
    assert marks.keys() == COUNTS.keys(), f"{MARKS.name} has other names than {', '.join(COUNTS)}"
    status = 0
    for name, count in COUNTS.items():
        calls, divisor = count()
        per_unit, mark = len(calls) / divisor, marks[name]["mark"]
        print(f"{name}: {per_unit:.1f} Python calls, mark {mark}")
        if per_unit > mark:
            status = 1
            print(
                f"verify-calls: {name} takes {per_unit:.1f} Python calls, the mark is {mark}. Most of them:",
                *calls.most(divisor),
                f"Take calls away, or raise the mark in {MARKS} and say why there.",
                sep="\n",
                file=sys.stderr,
            )
    return status


if __name__ == "__main__":
    logging.disable()  # a line of a request is a call, but no news here
    sys.exit(main())
