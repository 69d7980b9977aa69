"""A stream that began at another frontend: its engine is asked for it, and its choices go on where its client is."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from triptych.errors import EngineUnavailable, InvalidRequest, NotKept
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32
from triptych.types.submit import AttachRequest, EngineWelcome, SubmitRequest
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import Attachment
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.kinds import terms_of
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.migrator import Migrator
from triptych_services.frontend.streams.outputs import RequestOutputs
from triptych_services.frontend.streams.placement import go_on
from triptych_services.frontend.streams.resume import (
    ResumeToken,
    Retention,
    SeenChoice,
    StreamState,
)
from triptych_services.frontend.streams.route import ChoiceRoute, RetainedStream, Submission

_ANSWER_S = 5.0  # an engine answers between two steps
_NOTHING = SeenChoice()


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
            wanted=terms_of(self.welcome),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            deadline=None if remaining_s is None else time.monotonic() + remaining_s,
            whole_output=request.whole_output,
            retention=retention,
        )
        routes: list[ChoiceRoute] = []
        cached_tokens = request.cached_tokens or (None,) * request.num_choices
        columns = zip(request.emitted, request.seeds.tolist(), cached_tokens, strict=True)
        for index, (emitted, seed, num_cached_tokens) in enumerate(columns):
            choice = outputs.add_choice(
                self.sampling,
                text.tokenizer,
                request.prompt_token_ids,
                state.echo,
                index=index,
                min_interval_tokens=state.min_interval_tokens,
                split=split,
            )
            choice.num_cached_tokens = num_cached_tokens
            token_ids = emitted.tolist()
            self.seen_token_ids[index] = token_ids
            if token_ids and not seen.get(index, _NOTHING).is_finished:
                await go_on(text, choice, token_ids, "seen")
            route = ChoiceRoute(submission, choice, migrator.on_change, seed=seed, emitted=token_ids)
            route.is_admitted = True
            routes.append(route)
        outputs.send_by(routes)
        for number, route in zip(self.numbers, routes, strict=True):
            route.begin(self.engine, number)
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
