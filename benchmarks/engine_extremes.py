"""Measures the longest turns of a loop that requests can cause: how long each delays all other requests.

    python benchmarks/engine_extremes.py [--rounds 5]

CPU time of the thread. The scheduler and the frontend's session alone, without a worker or a network.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import numpy as np

from services.enginecore.request import Request
from services.enginecore.scheduler import Scheduler
from services.frontend.engines.session import EngineSession
from services.frontend.outputs import RequestOutputs
from triptych.config import SchedulerConfig
from triptych.text.tokenizer import Tokenizer
from triptych.types.outputs import OutputBatch
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepResult
from triptych.types.submit import SessionTerms, SubmitRequest, single_choice
from triptych.wire.engine_core import submit_from_proto, submit_to_proto

BLOCK_SIZE = 16
NUM_ROWS = 4096


def preemption_s() -> float:
    """One schedule() when 4,096 rows cross a block border and no block is free."""
    scheduler = _scheduler(
        NUM_ROWS + 1, max_model_len=64, max_num_seqs=NUM_ROWS, budget=16 * NUM_ROWS, caching=False
    )
    for number in range(NUM_ROWS):
        submit = single_choice(number, str(number), [7] * 15, SamplingParams(max_tokens=40), seed=number)
        scheduler.add(*Request.choices_of(submit, session=0))
    scheduler.schedule()
    scheduler.schedule()
    elapsed_s = _cpu_s(scheduler.schedule)
    assert scheduler.counters.num_preemptions, "blocks sufficed"
    return elapsed_s


def plan_s() -> float:
    """The longest plan while 256 choices of one 32k prompt are admitted."""
    num_choices, length = 256, 32_768
    scheduler = _scheduler(
        20 * num_choices + length // BLOCK_SIZE + 100,
        max_model_len=length + 256,
        max_num_seqs=num_choices,
        budget=8192,
        caching=True,
    )
    scheduler.add(*Request.choices_of(_group(num_choices, length, SamplingParams(max_tokens=200)), session=0))
    worst_s = 0.0
    while scheduler.num_running < num_choices:
        worst_s = max(worst_s, _cpu_s(scheduler.schedule))
        step = next(iter(scheduler._in_flight))
        scheduler.update(StepResult(step.step_id, np.ones(len(step.sampling_slots), np.uint32)))
    return worst_s


def loss_s() -> float:
    """The loss of an engine that computes 4,096 choices of one request."""

    async def lose() -> float:
        session, outputs = EngineSession(SessionTerms("s", False, 0, 10.0)), RequestOutputs("r")
        sampling = SamplingParams(n=NUM_ROWS, detokenize=False)
        for _ in range(NUM_ROWS):
            outputs.add_choice(sampling, _NO_TOKENIZER, [1, 2, 3], "")
        request = _group(NUM_ROWS, 3, sampling, first=1)
        session.submit(request, outputs.choices)
        token_ids = np.full(NUM_ROWS, 5, np.uint32)
        session.take_in(
            OutputBatch(1, admitted=request.numbers, numbers=request.numbers, token_ids=token_ids), 0
        )
        return _cpu_s(lambda: session.end("engine-0 was lost"))

    return asyncio.run(lose())


def submission_s() -> float:
    """One request of 1,024 choices with 100,000 allowed token ids, written and read."""
    sampling = SamplingParams(allowed_token_ids=tuple(range(100_000)), max_tokens=16)
    request = _group(1024, 1000, sampling)

    def travel() -> None:
        message = submit_to_proto(request).SerializeToString()
        Request.choices_of(submit_from_proto(type(submit_to_proto(request)).FromString(message)), session=0)

    return _cpu_s(travel)


_NO_TOKENIZER: Tokenizer = None  # type: ignore[assignment] # nothing is detokenized
CASES: dict[str, Callable[[], float]] = {
    "schedule(): 4,096 rows cross a block border, no block is free": preemption_s,
    "the longest plan: 256 choices of a 32k prompt wait": plan_s,
    "the loss of an engine: 4,096 choices": loss_s,
    "a request on the wire: 1,024 choices, 100,000 allowed ids": submission_s,
}


def _scheduler(
    num_blocks: int, *, max_model_len: int, max_num_seqs: int, budget: int, caching: bool
) -> Scheduler:
    return Scheduler(
        config=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_num_waiting=NUM_ROWS
        ),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=[],
        enable_prefix_caching=caching,
        clock=time.monotonic,
    )


def _group(num_choices: int, length: int, sampling: SamplingParams, first: int = 0) -> SubmitRequest:
    numbers = np.arange(first, first + num_choices)
    return SubmitRequest(
        request_id="r",
        numbers=numbers.astype(np.uint32),
        seeds=numbers.astype(np.uint64),
        prompt_token_ids=np.random.default_rng(0).integers(0, 32_000, length, dtype=np.uint32),
        sampling=sampling,
    )


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for name, measure in CASES.items():
        times_ms = sorted(1e3 * measure() for _ in range(arguments.rounds))
        print(f"{name}: {statistics.median(times_ms):.1f} ms ({times_ms[0]:.1f}-{times_ms[-1]:.1f})")


if __name__ == "__main__":
    main()
