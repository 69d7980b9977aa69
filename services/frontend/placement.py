"""A request's choices, and the engine that is asked to compute them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.frontend.accounting import RequestRecord
from services.frontend.choice import Choice
from services.frontend.engines.client import EngineClient
from services.frontend.engines.router import Router
from services.frontend.identity import choice_seed
from services.frontend.logprobs import PromptReport
from services.frontend.outputs import RequestOutputs
from services.frontend.requests.prepare import PreparedRequest
from services.frontend.requests.raw import RawRequest
from services.frontend.text_model import TextModel
from triptych.errors import InvalidRequest, QueueFull
from triptych.types.sampling import OutputKind
from triptych.types.submit import SubmitRequest

CHOICES_PER_TURN = 256  # of one request made in one go, before the loop serves others


async def place(
    request: PreparedRequest,
    outputs: RequestOutputs,
    record: RequestRecord,
    router: Router,
    text: TextModel,
) -> None:
    """Have an engine admit a request: the one that the router prefers, or the next where its queue is full.

    Raises:
        TriptychError: No engine takes it.
    """
    tried: list[EngineClient] = []
    while True:
        engine = router.choose(request.engine, tried=tried)
        try:
            await _submit(request, engine, outputs, record, text)
            await outputs.wait_admitted()
            return
        except QueueFull:
            tried.append(engine)
            if not router.has_others(request.engine, tried):
                raise
            outputs.start_over()


async def _submit(
    request: PreparedRequest,
    engine: EngineClient,
    outputs: RequestOutputs,
    record: RequestRecord,
    text: TextModel,
) -> None:
    """Hand all choices to an engine."""
    raw, sampling = request.raw, request.sampling
    if sampling.prompt_logprobs is not None:
        prompt = request.prompt_token_ids
        outputs.expect_prompt(PromptReport(prompt, sampling.prompt_logprobs, text.tokenizer.token_bytes))
    indices = raw.emitted or range(sampling.n)
    for number, index in enumerate(indices):
        if number and number % CHOICES_PER_TURN == 0:
            await asyncio.sleep(0)
        choice = outputs.add_choice(
            sampling,
            text.tokenizer,
            request.prompt_token_ids,
            request.echo,
            index=index,
            min_interval_tokens=raw.min_interval_tokens,
            split=request.split,
        )
        if emitted := raw.emitted.get(index):
            await _go_on(text, choice, emitted, f"{raw.path('emitted')}[{number}].token_ids")
    seeds = [choice_seed(request.seed, index) for index in indices]
    emitted_columns = tuple(np.array(token_ids, np.uint32) for token_ids in raw.emitted.values())

    # without output, one token is asked for all the same: it comes with the prompt
    engine_sampling = sampling if sampling.max_tokens else replace(sampling, max_tokens=1)

    def create(numbers: Sequence[int]) -> SubmitRequest:
        return SubmitRequest(
            request_id=request.request_id,
            numbers=np.array(numbers, np.uint32),
            seeds=np.array(seeds, np.uint64),
            prompt_token_ids=request.prompt_token_ids,
            emitted=emitted_columns,
            sampling=engine_sampling,
            priority=raw.priority,
            tenant=raw.tenant,
            cache_salt=raw.cache_salt,
            deadline_remaining_ms=_remaining_ms(raw, record),
            # a stop string is looked for here, and each step behind it is computed for nothing
            whole_output=sampling.output_kind is OutputKind.FINAL_ONLY and not sampling.stop,
        )

    for number, choice in zip(engine.submit(create, outputs.choices), outputs.choices, strict=True):
        choice.stop_upstream = functools.partial(engine.stop, number, choice)
        choice.abort_upstream = functools.partial(engine.abort, number, choice)


async def _go_on(text: TextModel, choice: Choice, emitted: Sequence[int], path: str) -> None:
    try:
        await text.run(len(emitted), choice.go_on_from, emitted)
    except ValueError as error:
        raise InvalidRequest(path, str(error)) from None


def _remaining_ms(raw: RawRequest, record: RequestRecord) -> int | None:
    if raw.deadline_s is None:
        return None
    return max(1, round((raw.deadline_s - record.elapsed_s) * 1000))
