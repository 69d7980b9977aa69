"""Which engine computes a prompt: the one that decodes, or one that prefills for others and leaves it the blocks.

Everything that counts is in seconds (docs/adr/0035):

    here      until the first token, and for every stream that runs there the time by which the prompt delays it
    remote    until the prompt is computed there, and until its blocks have come over; both go on at the same time
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from triptych.errors import TriptychError
from triptych.types.kv_transfer import LEASE_BYTES, EngineRole, KvSource
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32
from triptych.types.submit import RequestHead, SubmitRequest
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import ChoiceOutput, EngineLoss
from triptych_services.frontend.routing.load import WorkTimes
from triptych_services.frontend.routing.prefix_index import RoutedPrompt

_BYTES_PER_S = 5e8
"""Speed at which blocks come over: what one connection carried between two processes on two busy cores."""
_NUM_PARTS = 4
"""Parts in which a prompt is computed and pulled: the last one is pulled when all are computed."""
_UNMEASURED_TOKEN_S = 1e-4  # for each token of a prompt, where no engine has measured any yet
_ADMISSION_S = 0.25
"""Seconds that an engine has to take a prompt: it answers within a turn of its loop, or is in trouble."""
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


@dataclass(frozen=True, slots=True)
class PromptJob:
    """A prompt that is to be computed somewhere."""

    head: RequestHead
    token_ids: U32
    deadline: float | None = None
    """On the monotonic clock. None: there is none."""
    routed: RoutedPrompt | None = None
    """The prompt as the router looks at it. None: it is not known what is cached of it."""

    def to_request(self, numbers: Sequence[int], lease: bytes) -> SubmitRequest:
        """Return the message that has an engine compute it and hold its blocks under a lease."""
        remaining_s = None if self.deadline is None else self.deadline - time.monotonic()
        return SubmitRequest(
            head=replace(self.head, request_id=f"{self.head.request_id}-prefill"),
            numbers=np.array(numbers, np.uint32),
            seeds=np.zeros(1, np.uint64),
            prompt_token_ids=self.token_ids,
            sampling=_SAMPLING,
            deadline_remaining_ms=None if remaining_s is None else max(1, round(remaining_s * 1000)),
            whole_output=True,
            kv_lease=lease,
        )


class RemotePrefill:
    """A prompt that an engine computes for another one; the sink of that submission."""

    def __init__(self, engine: EngineClient, source: KvSource) -> None:
        """`source`: where its blocks can be pulled."""
        self.source = source
        self._engine = engine
        self._number = 0
        self._is_taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def begin(self, job: PromptJob) -> bool:
        """Submit the prompt, and return whether the engine has taken it."""
        try:
            numbers = self._engine.submit(
                lambda numbers: job.to_request(numbers, self.source.lease), [self], job.routed
            )
            self._number = numbers[0]
            async with asyncio.timeout(_ADMISSION_S):
                return await self._is_taken
        except (TriptychError, TimeoutError):
            self.abort()
            return False
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """End it: its blocks are not needed. Safe at any time; blocks of a prompt that is computed are let go later."""
        self._engine.abort(self._number, self)

    def on_output(self, output: ChoiceOutput) -> None:
        """Take that the engine computes it. Its output is not needed: the engine that decodes computes it again."""
        self._answer(True)

    def on_end(self, why: Exception | EngineLoss) -> None:
        self._answer(False)

    def _answer(self, is_taken: bool) -> None:
        if not self._is_taken.done():
            self._is_taken.set_result(is_taken)


async def prefill_elsewhere(
    engines: Iterable[EngineClient], decoding: EngineClient, job: PromptJob
) -> RemotePrefill | None:
    """Have another engine compute a prompt if that is expected to cost less time than computing it where it decodes.

    Args:
        engines: All that are known.
        decoding: The engine that the request is submitted to.
        job: The prompt.

    Returns:
        The prompt that is being computed for `decoding`; None: it is to compute the prompt itself.
    """
    best = choose_source(engines, decoding, job)
    if best is None:
        return None
    engine, ready_in_s = best
    assert engine.welcome is not None, "a ready engine has been welcomed"
    assert engine.welcome.kv_endpoint is not None, "it was chosen for it"
    source = KvSource(engine.welcome.kv_endpoint, secrets.token_bytes(LEASE_BYTES), ready_in_s)
    prefill = RemotePrefill(engine, source)
    return prefill if await prefill.begin(job) else None


def choose_source(
    engines: Iterable[EngineClient], decoding: EngineClient, job: PromptJob
) -> tuple[EngineClient, float] | None:
    """Return the engine that a prompt is best computed on for another, and in how many seconds its blocks are there.

    None: it is best computed where it decodes.
    """
    welcome = decoding.welcome
    if welcome is None or welcome.role is not EngineRole.DECODE or welcome.kv_endpoint is None:
        return None
    endpoint, load, num_tokens = welcome.kv_endpoint, decoding.load, len(job.token_ids)
    if not load.is_known or not load.block_size:
        return None
    num_here = num_tokens - _count_cached(decoding, job.routed)
    transfer_s = endpoint.pulled_bytes(num_here / load.block_size, num_tokens) / _BYTES_PER_S
    best: tuple[float, EngineClient] | None = None
    for engine in engines:
        if not _serves(engine, endpoint.layout, num_tokens):
            continue
        token_s = engine.load.reported.prefill_token_s or load.reported.prefill_token_s or _UNMEASURED_TOKEN_S
        num_there = num_tokens - _count_cached(engine, job.routed)
        computed_s = engine.load.first_token_s(
            num_there, 1, WorkTimes(token_s, engine.load.reported.decode_step_s)
        )
        seconds = max(computed_s, transfer_s) + min(computed_s, transfer_s) / _NUM_PARTS
        if best is None or seconds < best[0]:
            best = seconds, engine
    if best is None:
        return None
    remote_s, engine = best
    token_s = load.reported.prefill_token_s or engine.load.reported.prefill_token_s or _UNMEASURED_TOKEN_S
    delay_s = load.reported.num_running * num_here * token_s
    here_s = load.first_token_s(num_here, 1, WorkTimes(token_s, load.reported.decode_step_s)) + delay_s
    return (engine, remote_s) if remote_s + load.reported.decode_step_s < here_s else None


def _serves(engine: EngineClient, layout: str, num_tokens: int) -> bool:
    """Return whether an engine can compute prompts of this length for workers of this layout."""
    welcome = engine.welcome
    return (
        engine.is_ready
        and welcome is not None
        and welcome.role is EngineRole.PREFILL
        and welcome.kv_endpoint is not None
        and welcome.kv_endpoint.layout == layout
        and welcome.model is not None
        and num_tokens < welcome.model.max_model_len
        and engine.load.is_known
    )


def _count_cached(engine: EngineClient, routed: RoutedPrompt | None) -> int:
    return 0 if routed is None else engine.load.count_cached_tokens(routed)
