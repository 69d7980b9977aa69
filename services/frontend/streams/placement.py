"""How a request comes to an engine: a new one is placed, one that began at another frontend is attached to.

place     prepared request ──► choices, routes ──► the engine that the router prefers
take_up   token ──► the engine that keeps the stream ──► choices, routes, from where the client is
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from triptych.errors import EngineUnavailable, InvalidRequest, NotKept, QueueFull
from triptych.types.adapters import AdapterFacts
from triptych.types.sampling import OutputKind, SamplingParams
from triptych.types.step import U32
from triptych.types.submit import AttachRequest, EngineWelcome, ModelTerms, RequestNeeds, SubmitRequest
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.prefill import PromptJob, RemotePrefill, prefill_elsewhere
from triptych_services.frontend.engines.session import Attachment
from triptych_services.frontend.requests.identity import choice_seed
from triptych_services.frontend.requests.prepare import PreparedRequest
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.requests.tools import AnswerSplit
from triptych_services.frontend.routing.kinds import terms_of
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.accounting import RequestRecord
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.migrator import Migrator
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.resume import ResumeToken, Retention, SeenChoice, StreamState
from triptych_services.frontend.streams.route import ChoiceRoute, RetainedStream, Submission

CHOICES_PER_TURN = 256  # of one request made in one go, before the loop serves others
_ANSWER_S = 5.0  # an engine answers between two steps
_NOTHING = SeenChoice()


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
    needs = _needs_of(request)
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


def _needs_of(request: PreparedRequest) -> RequestNeeds:
    """Return the demands on the engine that computes all choices of a request."""
    num_tokens, has_priority, pooling = (
        len(request.prompt_token_ids),
        request.head.priority != 0,
        request.raw.pooling,
    )
    if pooling is not None:
        return RequestNeeds(num_tokens, 1, has_priority, pooling.task.label)
    num_output_tokens = max(request.sampling.max_tokens or 0, 1)
    num_choices = len(request.raw.emitted) or request.sampling.n
    return RequestNeeds(num_tokens + num_output_tokens, num_choices, has_priority)


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
        pooling=raw.pooling,
    )
    common = _Common(submission, sampling, request.echo, raw.min_interval_tokens, request.split)
    routes: list[ChoiceRoute] = []
    for place, index in enumerate(raw.emitted or range(sampling.n)):
        if place and place % CHOICES_PER_TURN == 0:
            await asyncio.sleep(0)
        emitted = raw.emitted.get(index, ())
        path = f"{raw.path('emitted')}[{place}].token_ids" if emitted else ""
        start = _Start(index, choice_seed(request.seed, index), emitted, path)
        routes.append(await _add_choice(outputs, common, start, migrator, text))
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
    takes_blocks = raw.pooling is None and request.terms.adapter is None
    if raw.emitted or not takes_blocks or request.sampling.prompt_logprobs is not None:
        return None  # none of that is in the blocks of a prompt
    job = PromptJob(
        head=request.head,
        token_ids=request.prompt_token_ids,
        deadline=None if raw.deadline_s is None else record.arrived + raw.deadline_s,
        routed=routed,
    )
    return await prefill_elsewhere(router.engines, engine, job)


@dataclass(frozen=True, slots=True)
class AttachedEvent:
    """The first event of a stream that goes on here."""

    state: StreamState
    seen_token_ids: Mapping[int, Sequence[int]]
    """Index of a choice -> the output tokens that the client has."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedStream:
    """A request whose outputs come here from now on."""

    engine: EngineClient
    welcome: EngineWelcome
    """Facts of the engine."""
    attachment: Attachment
    request: SubmitRequest
    """As the engine has it; `emitted` is what the client has seen."""
    state: StreamState
    raw: RawRequest
    """As far as it is known here."""
    sampling: SamplingParams
    tokenize_ns: int = 0
    seen_token_ids: dict[int, list[int]] = field(default_factory=dict)
    """As in `AttachedEvent`."""

    @property
    def request_id(self) -> str:
        return self.request.head.request_id

    @property
    def numbers(self) -> list[int]:
        """The names of its choices here."""
        return self.request.numbers.tolist()

    @property
    def prompt_token_ids(self) -> U32:
        return self.request.prompt_token_ids

    async def go_on(
        self, outputs: RequestOutputs, seen: Mapping[int, SeenChoice], migrator: Migrator, text: TextModel
    ) -> None:
        """Build the choices, and let them have what comes.

        Raises:
            InvalidRequest: A choice has ended within what its client has, although it does not say so.
        """
        request, state, remaining_s = self.request, self.state, self.raw.deadline_s
        chat = state.raw_chat
        split = None if chat is None else text.split_answer(chat, request.prompt_token_ids)
        retention = Retention(
            request.keep_ms, request.frontend_state, state.num_choices, request.resume_secret
        )
        submission = Submission(
            head=request.head,
            wanted=_terms_of(request, self.welcome),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            deadline=None if remaining_s is None else time.monotonic() + remaining_s,
            whole_output=request.whole_output,
            retention=retention,
        )
        common = _Common(submission, self.sampling, state.echo, state.min_interval_tokens, split)
        routes: list[ChoiceRoute] = []
        cached_tokens = request.cached_tokens or (None,) * request.num_choices
        columns = zip(request.emitted, request.seeds.tolist(), cached_tokens, strict=True)
        for index, (emitted, seed, num_cached_tokens) in enumerate(columns):
            token_ids = self.seen_token_ids[index] = emitted.tolist()
            start = _Start(index, seed, token_ids, "seen", seen.get(index, _NOTHING).is_finished)
            route = await _add_choice(outputs, common, start, migrator, text)
            route.choice.num_cached_tokens = num_cached_tokens
            routes.append(route)
        outputs.send_by(routes)
        number_to_guesses = {} if request.guesses is None else request.guesses.by_number
        for number, route in zip(self.numbers, routes, strict=True):
            route.guesses = number_to_guesses.get(number, route.guesses)
            route.take_up(self.engine, number)
            if seen.get(route.choice.index, _NOTHING).is_finished:
                route.choice.end_as_seen(len(route.emitted))
            # A choice that its engine has given up meanwhile was computed by another worker than the engine has now.
            route.facts = None
        self.attachment.connect(dict(zip(self.numbers, routes, strict=True)))
        for route in [route for route in routes if route.engine is not None]:
            route.facts = self.welcome.model
        for route in [route for route in routes if route.choice.finish_reason is not None]:
            route.stop_early()
        outputs.end_if_aborted()
        outputs.retained = RetainedStream(retention, routes)

    def leave(self) -> None:
        """Let what no choice reads wait at the engine for another reader."""
        self.attachment.abandon()


@asynccontextmanager
async def take_up(
    token: ResumeToken, seen: Mapping[int, SeenChoice], router: Router, tenant: str | None, api: str
) -> AsyncGenerator[AttachedStream, None]:
    """Have an engine let a stream go on here.

    Raises:
        NotKept: No engine has it any more.
        InvalidRequest: The client says that it has what there is not, or the stream began with another API.
        EngineUnavailable: Its engine is not there now.
    """
    if beyond := [index for index in seen if index >= token.num_choices]:
        raise InvalidRequest("seen", f"choice {max(beyond)} of a stream with {token.num_choices}")
    stream = await _find(token, seen, router, tenant)
    try:
        if stream.state.api != api:
            raise InvalidRequest(
                "resume_token", f"the stream began over {stream.state.api}; go on with it there"
            )
        yield stream
    finally:
        stream.leave()


async def _find(
    token: ResumeToken, seen: Mapping[int, SeenChoice], router: Router, tenant: str | None
) -> AttachedStream:
    """Ask the engines of the token's name. Several may have it."""
    num_seen = {index: choice.num_tokens for index, choice in sorted(seen.items()) if choice.num_tokens}

    def create(first_number: int) -> AttachRequest:
        return AttachRequest(token.secret, first_number, token.num_choices, num_seen, tenant)

    refusal: NotKept | EngineUnavailable = NotKept(f"no engine here is named {token.engine_id!r:.80}")
    for engine in router.engines:
        if engine.welcome is None:  # this frontend has just been started: it may be the one
            refusal = EngineUnavailable(f"engine {engine.name} has not been reached yet; try again")
    for engine in router.engines:
        if engine.welcome is None or engine.welcome.engine_id != token.engine_id:
            continue
        try:
            attachment = engine.attach(create, token.num_choices)
            try:
                request = await attachment.wait(_ANSWER_S)
                state = StreamState.from_bytes(request.frontend_state)
            except BaseException:
                attachment.abandon()
                raise
        except (NotKept, EngineUnavailable) as error:
            refusal = error
        else:
            return _to_stream(engine, engine.welcome, attachment, request, state)
    raise refusal


def _to_stream(
    engine: EngineClient,
    welcome: EngineWelcome,
    attachment: Attachment,
    request: SubmitRequest,
    state: StreamState,
) -> AttachedStream:
    remaining_ms = request.deadline_remaining_ms
    raw = RawRequest(
        api=state.api,
        prompt=None,
        head=request.head,
        client_names=tuple(state.client_names),
        model=state.model,
        deadline_s=None if remaining_ms is None else remaining_ms / 1000,
        answer=state.answer,
        resumes=True,
    )
    sampling = replace(
        request.sampling,
        output_kind=state.output_kind,
        max_tokens=request.sampling.max_tokens if state.has_output else 0,
    )
    return AttachedStream(engine, welcome, attachment, request, state, raw, sampling)


def _terms_of(request: SubmitRequest, welcome: EngineWelcome) -> ModelTerms:
    """Return the terms of a request that an engine has."""
    terms = terms_of(welcome)
    if not request.adapter:
        return terms
    return replace(terms, adapter=AdapterFacts(request.adapter, request.adapter_digest, rank=0))


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """The point from which one choice is computed."""

    index: int
    seed: int
    emitted: Sequence[int]
    """Output tokens that the client has."""
    path: str
    """Path of the client's field that says so. Empty: there are none."""
    is_finished: bool = False
    """The client has all of it, so that no text follows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Common:
    """The part of a request that its choices have in common."""

    submission: Submission
    sampling: SamplingParams
    """As the client wrote them."""
    echo: str
    min_interval_tokens: int
    split: AnswerSplit | None
    """How the text is split into parts. None: it stays one text."""


async def _add_choice(
    outputs: RequestOutputs, common: _Common, start: _Start, migrator: Migrator, text: TextModel
) -> ChoiceRoute:
    """Make a choice, bring it to where its client is, and return its route.

    Raises:
        InvalidRequest: The choice has ended within what its client has.
    """
    submission, emitted = common.submission, start.emitted
    choice = outputs.add_choice(
        common.sampling,
        text.tokenizer,
        submission.prompt_token_ids,
        common.echo,
        index=start.index,
        min_interval_tokens=common.min_interval_tokens,
        split=common.split,
    )
    if emitted and not start.is_finished:
        try:
            await text.run(len(emitted), choice.continue_from, emitted)
        except ValueError as error:
            raise InvalidRequest(start.path, str(error)) from None
    return ChoiceRoute(submission, choice, migrator.on_change, seed=start.seed, emitted=emitted)
