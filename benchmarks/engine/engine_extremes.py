"""Measures the longest turns of a loop that requests can cause: how long each delays all other requests.

CPU time of the thread. Only the scheduler and the frontend's session, without a worker or a network.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.engine.requests import BLOCK_SIZE, create_scheduler, submit_of
from benchmarks.harness.command import create_parser, run
from benchmarks.harness.figures import Figure
from benchmarks.harness.timing import cpu_s
from triptych.observe.metrics import FrontendMetrics
from triptych.types.facts import ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.outputs import OutputBatch
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult
from triptych.types.submit import EngineLimits, ModelTerms, RequestHead, SubmitRequest
from triptych.wire.engine_core import submit_from_proto, submit_to_proto
from triptych_services.enginecore.request import Request
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import EngineLoss, EngineSession
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import MigrationTerms, Migrator
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.route import ChoiceRoute, Submission

NUM_ROWS = 4096


def preemption_s() -> float:
    """Measure one schedule() when 4,096 rows cross a block border and no block is free."""
    sampling = SamplingParams(max_tokens=40)
    scheduler = create_scheduler(
        [submit_of(number, BLOCK_SIZE - 1, sampling) for number in range(NUM_ROWS)],
        num_blocks=NUM_ROWS + 1,
        max_model_len=64,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=BLOCK_SIZE * NUM_ROWS,
        enable_prefix_caching=False,
    )
    scheduler.schedule()
    scheduler.schedule()
    elapsed_s = cpu_s(scheduler.schedule)
    assert scheduler.counters.num_preemptions, "there were enough blocks"
    return elapsed_s


def plan_s() -> float:
    """Measure the longest plan while 256 choices of one 32k prompt are admitted."""
    num_choices, length = 256, 32_768
    scheduler = create_scheduler(
        [_group(num_choices, length, SamplingParams(max_tokens=200))],
        num_blocks=20 * num_choices + length // BLOCK_SIZE + 100,
        max_model_len=length + 256,
        max_num_seqs=num_choices,
        max_num_batched_tokens=8192,
    )
    worst_s = 0.0
    while len(scheduler.snapshot().running) < num_choices:
        plans = []
        worst_s = max(worst_s, cpu_s(lambda: plans.append(scheduler.schedule())))  # noqa: B023 # called at once
        (plan,) = plans
        assert plan is not None
        step = scheduler.snapshot().steps_in_flight[0]
        scheduler.update(StepResult(step.step_id, np.ones(len(step.sampling_slots), np.uint32)))
    return worst_s


def loss_s() -> float:
    """Measure the loss of an engine that computes 4,096 choices of one request."""

    async def lose() -> float:
        session, outputs = EngineSession("s"), RequestOutputs("r")
        sampling = SamplingParams(n=NUM_ROWS, detokenize=False)
        for _ in range(NUM_ROWS):
            outputs.add_choice(sampling, None, [1, 2, 3], "")  # type: ignore[arg-type] # needs no tokenizer
        request = _group(NUM_ROWS, 3, sampling, first=1)
        migrator = Migrator(Router(), FrontendMetrics.create(CollectorRegistry()), MigrationTerms())
        model = ModelFacts("m", ModelIdentity("f"), 1000, 1 << 20, (), "float32", "float32", "none")
        terms = ModelTerms(model, EngineLimits(), model.max_model_len)
        submission = Submission(RequestHead("r"), terms, request.prompt_token_ids, sampling)
        routes = [
            ChoiceRoute(submission, choice, migrator.on_change, seed=choice.index)
            for choice in outputs.choices
        ]
        session.submit(request, routes)
        engine = EngineClient("127.0.0.1:1", frontend_id="f", boot_id="b")
        for number, route in enumerate(routes, start=1):
            route.begin(engine, number)
        token_ids = np.full(NUM_ROWS, 5, np.uint32)
        batch = OutputBatch(1, admitted=request.numbers, numbers=request.numbers, token_ids=token_ids)
        session.take_in(batch, 0)
        return cpu_s(lambda: session.end(EngineLoss("engine-0 was lost")))

    return asyncio.run(lose())


def submission_s() -> float:
    """Measure one request of 1,024 choices with 100,000 allowed token ids, written and read."""
    sampling = SamplingParams(allowed_token_ids=tuple(range(100_000)), max_tokens=16)
    request = _group(1024, 1000, sampling)

    def travel() -> None:
        message = submit_to_proto(request)
        read = type(message).FromString(message.SerializeToString())
        Request.choices_of(submit_from_proto(read), session=0)

    return cpu_s(travel)


CASES: dict[str, Callable[[], float]] = {
    "schedule(): 4,096 rows cross a block border, no block is free": preemption_s,
    "the longest plan: 256 choices of a 32k prompt wait": plan_s,
    "the loss of an engine: 4,096 choices": loss_s,
    "a request on the wire: 1,024 choices, 100,000 allowed ids": submission_s,
}


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    for _ in range(arguments.rounds):
        for name, case_s in CASES.items():
            yield Figure(name, "ms", (1e3 * case_s(),))


def _group(num_choices: int, length: int, sampling: SamplingParams, first: int = 0) -> SubmitRequest:
    numbers = np.arange(first, first + num_choices)
    return SubmitRequest(
        head=RequestHead("r"),
        numbers=numbers.astype(np.uint32),
        seeds=numbers.astype(np.uint64),
        prompt_token_ids=np.random.default_rng(0).integers(0, 32_000, length, dtype=np.uint32),
        sampling=sampling,
    )


if __name__ == "__main__":
    sys.exit(run(create_parser(__doc__, rounds=5), measure))
