"""A request's choices, and the engine that is asked to compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from triptych.errors import InvalidRequest, QueueFull
from triptych.types.sampling import OutputKind
from triptych.types.submit import RequestNeeds
from triptych_services.frontend.accounting import RequestRecord
from triptych_services.frontend.choice import Choice
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.journey import Journey, Submission
from triptych_services.frontend.engines.mover import Mover
from triptych_services.frontend.engines.prefill import PromptJob, RemotePrefill, prefill_elsewhere
from triptych_services.frontend.engines.prefix_index import RoutedPrompt
from triptych_services.frontend.engines.router import Router
from triptych_services.frontend.identity import choice_seed
from triptych_services.frontend.logprobs import PromptReport
from triptych_services.frontend.outputs import RequestOutputs
from triptych_services.frontend.requests.prepare import PreparedRequest
from triptych_services.frontend.resumption import Keep, KeptStream
from triptych_services.frontend.text_model import TextModel

CHOICES_PER_TURN = 256  # of one request made in one go, before the loop serves others


async def place(
    request: PreparedRequest,
    outputs: RequestOutputs,
    record: RequestRecord,
    router: Router,
    mover: Mover,
    text: TextModel,
    keep: Keep | None = None,
) -> None:
    """Have an engine admit a request: the one that the router prefers, or the next where its queue is full.

    Args:
        keep: How it is kept for other frontends. None: not at all.

    Raises:
        TriptychError: No engine takes it.
    """
    tried: list[EngineClient] = []
    token_ids, cache_salt = request.prompt_token_ids, request.raw.cache_salt
    routed = await text.run(len(token_ids), router.read_prompt, request.terms, token_ids, cache_salt)
    needs = RequestNeeds(
        len(token_ids) + max(request.sampling.max_tokens or 0, 1),
        len(request.raw.emitted) or request.sampling.n,
        request.raw.priority != 0,
    )
    while True:
        engine = router.choose(request.terms, needs, tried=tried, prompt=routed)
        prefill = await _prefill_elsewhere(request, engine, record, router, routed)
        if prefill is not None and not engine.is_ready:  # it was lost meanwhile
            prefill.abort()
            continue
        try:
            await _submit(request, engine, outputs, record, mover, text, routed, prefill, keep)
            await outputs.wait_admitted()
            return
        except QueueFull:
            tried.append(engine)
            if not router.alike(request.terms, needs, tried):
                raise
            outputs.start_over()


async def _submit(
    request: PreparedRequest,
    engine: EngineClient,
    outputs: RequestOutputs,
    record: RequestRecord,
    mover: Mover,
    text: TextModel,
    routed: RoutedPrompt | None,
    prefill: RemotePrefill | None,
    keep: Keep | None,
) -> None:
    """Hand all choices to an engine. `prefill`: None: it computes the prompt."""
    raw, sampling = request.raw, request.sampling
    if sampling.prompt_logprobs is not None:
        prompt = request.prompt_token_ids
        outputs.expect_prompt(PromptReport(prompt, sampling.prompt_logprobs, text.tokenizer.token_bytes))
    submission = Submission(
        request_id=request.request_id,
        wanted=request.terms,
        prompt_token_ids=request.prompt_token_ids,
        routed=routed,
        kv_source=None if prefill is None else prefill.source,
        # without output, one token is asked for all the same: it comes with the prompt
        sampling=sampling if sampling.max_tokens else replace(sampling, max_tokens=1),
        priority=raw.priority,
        tenant=raw.tenant,
        cache_salt=raw.cache_salt,
        deadline=None if raw.deadline_s is None else record.arrived + raw.deadline_s,
        # a stop string is looked for here, and each step behind it is computed for nothing
        whole_output=sampling.output_kind is OutputKind.FINAL_ONLY and not sampling.stop,
        keep=keep,
    )
    journeys: list[Journey] = []
    for place, index in enumerate(raw.emitted or range(sampling.n)):
        if place and place % CHOICES_PER_TURN == 0:
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
        emitted = raw.emitted.get(index, ())
        if emitted:
            await go_on(text, choice, emitted, f"{raw.path('emitted')}[{place}].token_ids")
        seed = choice_seed(request.seed, index)
        journeys.append(Journey(submission, choice, mover, seed=seed, emitted=emitted))
        choice.stop_upstream, choice.abort_upstream = journeys[-1].stop, journeys[-1].abort
    if prefill is not None:
        outputs.choices[0].abort_upstream = _in_turn(journeys[0].abort, prefill.abort)
    numbers = engine.submit(lambda numbers: submission.to_request(numbers, journeys), journeys, routed)
    for number, journey in zip(numbers, journeys, strict=True):
        journey.begin(engine, number)
    if keep is not None:
        outputs.kept = KeptStream(keep, journeys)


async def _prefill_elsewhere(
    request: PreparedRequest,
    engine: EngineClient,
    record: RequestRecord,
    router: Router,
    routed: RoutedPrompt | None,
) -> RemotePrefill | None:
    """Have another engine compute the prompt, if that costs less time; see `prefill_elsewhere`."""
    raw = request.raw
    if raw.emitted or request.sampling.prompt_logprobs is not None:
        return None  # neither is in the blocks of a prompt
    job = PromptJob(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        priority=raw.priority,
        tenant=raw.tenant,
        cache_salt=raw.cache_salt,
        deadline=None if raw.deadline_s is None else record.arrived + raw.deadline_s,
        routed=routed,
    )
    return await prefill_elsewhere(router.engines, engine, job)


def _in_turn(*calls: Callable[[], None]) -> Callable[[], None]:
    """Return a function that makes all calls."""

    def call_all() -> None:
        for call in calls:
            call()

    return call_all


async def go_on(text: TextModel, choice: Choice, emitted: Sequence[int], path: str) -> None:
    """Bring a choice to where its client is. Raises InvalidRequest on `path` if it has ended there."""
    try:
        await text.run(len(emitted), choice.go_on_from, emitted)
    except ValueError as error:
        raise InvalidRequest(path, str(error)) from None
