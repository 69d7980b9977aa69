"""A request's choices, and the engine that is asked to compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from triptych.errors import InvalidRequest, QueueFull
from triptych.types.sampling import OutputKind
from triptych.types.submit import RequestNeeds
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.prefill import PromptJob, RemotePrefill, prefill_elsewhere
from triptych_services.frontend.requests.identity import choice_seed
from triptych_services.frontend.requests.prepare import PreparedRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.accounting import RequestRecord
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.migrator import Migrator
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.resume import Retention
from triptych_services.frontend.streams.route import ChoiceRoute, RetainedStream, Submission

CHOICES_PER_TURN = 256  # of one request made in one go, before the loop serves others


async def place(
    request: PreparedRequest,
    outputs: RequestOutputs,
    record: RequestRecord,
    router: Router,
    migrator: Migrator,
    text: TextModel,
    retention: Retention | None = None,
) -> None:
    """Have an engine admit a request: the one that the router prefers, or the next where its queue is full.

    Args:
        retention: How it is kept for other frontends. None: not at all.

    Raises:
        TriptychError: No engine takes it.
    """
    tried: list[EngineClient] = []
    token_ids, cache_salt = request.prompt_token_ids, request.head.cache_salt
    routed = await text.run(len(token_ids), router.read_prompt, request.terms, token_ids, cache_salt)
    needs = RequestNeeds(
        len(token_ids) + max(request.sampling.max_tokens or 0, 1),
        len(request.raw.emitted) or request.sampling.n,
        request.head.priority != 0,
    )
    while True:
        engine = router.choose(request.terms, needs, tried=tried, prompt=routed)
        prefill = await _prefill_elsewhere(request, engine, record, router, routed)
        if prefill is not None and not engine.is_ready:  # it was lost meanwhile
            prefill.abort()
            continue
        try:
            await _submit(request, engine, outputs, record, migrator, text, routed, prefill, retention)
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
    migrator: Migrator,
    text: TextModel,
    routed: RoutedPrompt | None,
    prefill: RemotePrefill | None,
    retention: Retention | None,
) -> None:
    """Hand all choices to an engine. `prefill`: None: it computes the prompt."""
    raw, sampling = request.raw, request.sampling
    if sampling.prompt_logprobs is not None:
        prompt = request.prompt_token_ids
        outputs.expect_prompt(PromptReport(prompt, sampling.prompt_logprobs, text.tokenizer.token_bytes))
    submission = Submission(
        head=request.head,
        wanted=request.terms,
        prompt_token_ids=request.prompt_token_ids,
        routed=routed,
        kv_source=None if prefill is None else prefill.source,
        # without output, one token is asked for all the same: it comes with the prompt
        sampling=sampling if sampling.max_tokens else replace(sampling, max_tokens=1),
        deadline=None if raw.deadline_s is None else record.arrived + raw.deadline_s,
        # a stop string is looked for here, and each step behind it is computed for nothing
        whole_output=sampling.output_kind is OutputKind.FINAL_ONLY and not sampling.stop,
        retention=retention,
    )
    routes: list[ChoiceRoute] = []
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
        routes.append(ChoiceRoute(submission, choice, migrator.on_change, seed=seed, emitted=emitted))
    outputs.send_by(routes, prefill)
    numbers = engine.submit(lambda numbers: submission.to_request(numbers, routes), routes, routed)
    for number, route in zip(numbers, routes, strict=True):
        route.begin(engine, number)
    if retention is not None:
        outputs.retained = RetainedStream(retention, routes)


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
        head=request.head,
        token_ids=request.prompt_token_ids,
        deadline=None if raw.deadline_s is None else record.arrived + raw.deadline_s,
        routed=routed,
    )
    return await prefill_elsewhere(router.engines, engine, job)


async def go_on(text: TextModel, choice: Choice, emitted: Sequence[int], path: str) -> None:
    """Bring a choice to where its client is. Raises InvalidRequest on `path` if it has ended there."""
    try:
        await text.run(len(emitted), choice.continue_from, emitted)
    except ValueError as error:
        raise InvalidRequest(path, str(error)) from None
