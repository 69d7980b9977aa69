"""Requests and schedulers that benchmarks of the engine core share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from triptych.config import SchedulerConfig
from triptych.types.facts import KvKind, KvLayout, ModelFacts, WorkerFacts
from triptych.types.identity import ModelIdentity
from triptych.types.sampling import SamplingParams
from triptych.types.submit import SubmitRequest, single_choice
from triptych_services.enginecore.request import Request
from triptych_services.enginecore.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 49152
PROMPT_LEN = 128
NUM_WARM_UP_STEPS = 64
_WINDOW = 128  # tokens


def submit_of(
    number: int, length: int, sampling: SamplingParams, *, vocab_size: int = VOCAB_SIZE
) -> SubmitRequest:
    """Return a request of `length` random tokens; the same number gives the same tokens."""
    prompt = np.random.default_rng(number).integers(3, vocab_size, length, dtype=np.uint32)
    return single_choice(number, str(number), prompt, sampling, seed=number)


def decoding_submits(num_running: int, sampling: SamplingParams) -> list[SubmitRequest]:
    """Return requests of BLOCK_SIZE different lengths, so that in each step as many cross into a new block."""
    return [submit_of(number, PROMPT_LEN + number % BLOCK_SIZE, sampling) for number in range(num_running)]


def blocks_of(num_running: int, max_model_len: int) -> int:
    """Return how many KV blocks suffice for all requests, including the null block."""
    return 1 + num_running * -(-max_model_len // BLOCK_SIZE)


def create_scheduler(
    submits: Sequence[SubmitRequest],
    *,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int = BLOCK_SIZE,
    enable_prefix_caching: bool = True,
    num_stages: int = 1,
    num_windows: int = 0,
) -> Scheduler:
    """Return a scheduler with these requests waiting."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_waiting=max(max_num_seqs, len(submits)),
    )
    facts = worker_facts(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        eos_token_ids=(2,),
        num_stages=num_stages,
        num_windows=num_windows,
    )
    scheduler = Scheduler(config, facts, enable_prefix_caching=enable_prefix_caching, clock=time.monotonic)
    for submit in submits:
        scheduler.requests.add(*Request.choices_of(submit, session=0))
    return scheduler


def worker_facts(
    *,
    num_blocks: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int = BLOCK_SIZE,
    eos_token_ids: tuple[int, ...] = (),
    num_stages: int = 1,
    num_windows: int = 0,
) -> WorkerFacts:
    """Return what a worker that computes nothing says of itself.

    Args:
        num_windows: Groups of layers with a window, beside the full one.
    """
    kv = KvLayout(num_blocks, block_size, 1, 1, 1, "float32")
    window = replace(kv.groups[0], kind=KvKind.WINDOW, window=_WINDOW)
    return WorkerFacts(
        boot_id="none",
        model=ModelFacts(
            "none",
            ModelIdentity("0" * 64),
            VOCAB_SIZE,
            max_model_len,
            eos_token_ids,
            dtype="float32",
            kv_dtype="float32",
            quantization="none",
        ),
        kv=replace(kv, groups=(*kv.groups, *[window] * num_windows)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=4,
        num_stages=num_stages,
    )
