"""THE path of a request: parse, template, tokenize, submit, outputs, events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from triptych.errors import DeadlineExceeded, EngineUnavailable
from triptych.observe.metrics import FrontendMetrics
from triptych.rpc.interceptors import new_request_id
from triptych.types.events import AdmittedEvent, Event, FinishedEvent
from triptych.types.facts import ModelFacts
from triptych.types.outputs import Usage
from triptych.types.pooling import GENERATION
from triptych.types.sampling import MAX_BIASES, OutputKind
from triptych.types.submit import ModelTerms
from triptych_services.frontend.access.caller import Caller, current_caller, set_tenant
from triptych_services.frontend.access.rate_limits import RateLimits
from triptych_services.frontend.pooled_calls import PooledCalls
from triptych_services.frontend.requests.parse import is_request_id
from triptych_services.frontend.requests.prepare import (
    PreparedRequest,
    check_task,
    longest_text,
    prepare,
    prepare_pooled,
)
from triptych_services.frontend.requests.raw import RawRequest
from triptych_services.frontend.requests.text_model import TextModel
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.siblings.siblings import SharedRateLimits, Siblings
from triptych_services.frontend.streams.accounting import RequestRecord
from triptych_services.frontend.streams.migrator import Migrator
from triptych_services.frontend.streams.outputs import EventReceiver, RequestOutputs
from triptych_services.frontend.streams.pacing import Pace
from triptych_services.frontend.streams.placement import AttachedEvent, AttachedStream, place, take_up
from triptych_services.frontend.streams.registry import AliveRequests, Departure
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice, create_retention
from triptych_services.frontend.text_calls import TextCalls


class ServedModel(NamedTuple):
    """A model that requests may name."""

    name: str
    max_model_len: int
    vocab_size: int
    created_unix_s: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    has_chat_template: bool = False
    has_tools: bool = False
    aliases: tuple[str, ...] = ()
    """Other names that requests may use."""
    default_sampling: Mapping[str, float] = MappingProxyType({})
    """Sampling fields that the checkpoint sets for requests that leave them out."""
    max_running: int = 0
    """Choices that run at a time at most, on all engines together. 0: not known."""
    tasks: tuple[str, ...] = (GENERATION,)
    """Names of what it computes: generate, embed, token_embed, classify."""
    num_labels: int = 0
    """Labels of its classifier. 0: it has none."""
    embedding_size: int = 0
    """Numbers of a vector of the whole length. 0: it makes none."""
    base_model: str = ""
    """The model that it adapts, of an adapter. Empty: it is none."""


class Generator:
    """The operations that the gRPC and HTTP APIs call. Bound to one event loop."""

    def __init__(
        self,
        router: Router,
        metrics: FrontendMetrics,
        migrator: Migrator,
        max_messages_per_s: float = 0,
        keep_s: float = 0,
        max_biases: int = MAX_BIASES,
        why_waiting: Callable[[], str] = str,
        on_rate_limited: Callable[[Caller, str], None] = lambda caller, unit: None,
        max_unsent_bytes: int = 256 << 20,
        siblings: Siblings | None = None,
    ) -> None:
        """
        Args:
            on_rate_limited: See `RateLimits`.
            why_waiting: Returns why requests that are taken wait; empty if they do not.
            max_messages_per_s: See `Pace`.
            keep_s: Seconds for which engines keep streams without a frontend. 0: not at all.
            max_biases: Most entries of `logit_bias` in a request.
            max_unsent_bytes: See `PooledCalls`.
            siblings: The other processes of this frontend. None: there are none.
        """
        self.why_waiting = why_waiting
        """Returns why requests that are taken wait; empty if they do not."""
        self._keep_s = keep_s
        self._max_biases = max_biases
        self._router = router
        self._metrics = metrics
        self._migrator = migrator
        self._text_model: TextModel | None = None
        self.siblings = siblings
        """The other processes of this frontend. None: there are none."""
        self.alive = AliveRequests(siblings)
        self._pace = Pace(max_messages_per_s, lambda: self.alive.num_generating)
        self._rate_limits = (
            RateLimits(on_refused=on_rate_limited)
            if siblings is None
            else SharedRateLimits(siblings, on_rate_limited)
        )
        self.text = TextCalls(router, self._rate_limits, lambda: self.text_model)
        self.pooled = PooledCalls(self.generate, router, max_unsent_bytes)
        self._is_draining = False
        self._started_unix_s = int(time.time())
        if siblings is not None:
            siblings.answer("abort", self.alive.abort_of)
            siblings.answer("count_active", lambda: self.num_active)
            siblings.answer("token_of_duplicate", self.alive.token_of_duplicate)

    def set_text_model(self, text: TextModel) -> None:
        """Called once, when tokenizer and template are loaded; until then nothing is ready."""
        self._text_model = text
        self._router.say_takes_streams(True)
        self._router.on_change()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, by this process and by its siblings."""
        return self.is_ready_here and (self.siblings is None or self.siblings.are_ready)

    @property
    def is_ready_here(self) -> bool:
        """Whether this process takes requests."""
        return self._text_model is not None and not self._is_draining and self._router.is_ready

    @property
    def why_not_ready(self) -> str:
        """Empty if it is."""
        if self.is_ready_here and not self.is_ready:
            return "another process of this frontend is not ready"
        if self._is_draining:
            return "this frontend is stopping; try another"
        if self._text_model is None:
            return "the tokenizer is being loaded"
        return "" if self._router.is_ready else self._router.why_not_ready

    @property
    def num_active(self) -> int:
        """Requests of this process between their first look-up and their last event."""
        return len(self.alive)

    async def count_active(self) -> int:
        """Return the number of such requests, those of its siblings among them."""
        others = [] if self.siblings is None else await self.siblings.ask_others("count_active")
        return self.num_active + sum(others)

    def models(self) -> list[ServedModel]:
        """Return the models of the ready engines, which requests may name now."""
        models = [self._served(facts) for facts in self._router.models]
        return models + [self._with_adapter(terms) for terms in self._router.adapters.all()]

    def find_model(self, name: str) -> ServedModel:
        """The model that `name` means; empty: the only one.

        Raises:
            ModelNotFound, EngineUnavailable, InvalidRequest: as `Router.find`.
        """
        return self._with_adapter(self._router.find(name))

    @property
    def num_ready_engines(self) -> int:
        return sum(engine.is_ready for engine in self._router.engines)

    async def generate(
        self, raw: RawRequest, receiver: EventReceiver | None = None
    ) -> AsyncGenerator[Event, None]:
        """AdmittedEvent first, then PromptLogprobsEvents if asked for, DeltaEvents of each choice, FinishedEvent last.

        Closing the iterator aborts the request at once: use `contextlib.aclosing`. A client that reads
        slowly gets fewer and larger deltas.

        Args:
            receiver: Takes what comes between the first and the last event, which is then not yielded.

        Raises:
            TriptychError: whatever ends the request; before the first event, or after all output so far.
        """
        if self._is_draining:
            raise EngineUnavailable(self.why_not_ready)
        if token := await self._claim_or_find(raw):
            async with aclosing(self.attach(ResumeToken.parse(token), {}, raw.api, receiver)) as events:
                async for event in events:
                    if not isinstance(event, AttachedEvent):
                        yield event
            return
        # A request whose id is no good is refused under a drawn one: ids appear in logs and headers.
        request_id = raw.head.request_id if is_request_id(raw.head.request_id) else new_request_id()
        outputs = RequestOutputs(request_id, self._pace)
        caller = current_caller()
        with (
            RequestRecord(self._metrics, raw.api, request_id) as record,
            self.alive.claim(outputs, raw) as raw,
        ):
            set_tenant(raw.head.tenant)
            record.tenant = raw.head.tenant
            self._router.check_free_places(raw.model, raw.head.priority, raw.head.tenant)
            if caller.has_limits:
                await self._rate_limits.admit(caller)
            request = await self.prepare(raw, request_id, record)
            outputs.path_of = request.raw.path
            deadline_timer = self._set_deadline_timer(raw, record, outputs)
            try:
                record.note_submitted()
                retention = create_retention(request, self._keep_s)
                await place(
                    request, outputs, record, self._router, self._migrator, self.text_model, retention
                )
                self._rate_limits.charge(caller, len(request.prompt_token_ids))
                record.note_admitted(len(request.prompt_token_ids), request.sampling)
                yield _admitted(request, outputs)
                async for event in _outputs_of(request, outputs, record, receiver):
                    yield event
                finished = _finish(request, outputs, record)
            finally:
                outputs.close()
                if not record.finish:
                    _record_outputs(request, outputs, record)
                self._rate_limits.charge(caller, record.usage.num_output_tokens)
                if deadline_timer is not None:
                    deadline_timer.cancel()
        yield finished  # its id is free by now: a client may send it again at once

    async def attach(
        self,
        token: ResumeToken,
        seen: Mapping[int, SeenChoice],
        api: str,
        receiver: EventReceiver | None = None,
    ) -> AsyncGenerator[AttachedEvent | Event, None]:
        """Go on with a stream that began at another frontend, or on another connection: an AttachedEvent, then as
        `generate` does.

        Args:
            seen: What the client has of each choice, by index. Empty: nothing.
            api: The API that it is called from, which must be the one that the stream began with.
            receiver: As in `generate`.

        Raises:
            NotKept: The stream is over, or was never kept.
            RateLimited: The caller has asked for too many such streams.
            TriptychError: As `generate`.
        """
        if self._is_draining:
            raise EngineUnavailable(self.why_not_ready)
        text, caller = self.text_model, current_caller()
        async with AsyncExitStack() as stack:
            async with self._rate_limits.guess(caller):
                attached = await stack.enter_async_context(
                    take_up(token, seen, self._router, caller.tenant, api)
                )
            raw, state = attached.raw, attached.state
            with (
                RequestRecord(self._metrics, api, attached.request_id) as record,
                self.alive.claim_again(attached.request_id, raw, self._pace) as outputs,
            ):
                record.note_model(state.model)
                record.tenant, record.is_resumed = raw.head.tenant, True
                deadline_timer = self._set_deadline_timer(raw, record, outputs)
                try:
                    await attached.go_on(outputs, seen, self._migrator, text)
                    yield AttachedEvent(state, attached.seen_token_ids)
                    yield AdmittedEvent(
                        attached.request_id,
                        state.model,
                        state.seed,
                        attached.prompt_token_ids,
                        state.is_limited_by_context,
                        fingerprint=state.fingerprint,
                        resume_token=outputs.resume_token,
                    )
                    async for event in _outputs_of(attached, outputs, record, receiver):
                        yield event
                    finished = _finish(attached, outputs, record)
                finally:
                    outputs.close()
                    if not record.finish:
                        _record_outputs(attached, outputs, record)
                    num_new = outputs.num_tokens - sum(map(len, attached.seen_token_ids.values()))
                    self._rate_limits.charge(caller, num_new)
                    if deadline_timer is not None:
                        deadline_timer.cancel()
            yield finished

    async def _claim_or_find(self, raw: RawRequest) -> str:
        """See `Siblings.claim_or_find`. A request that is alive may be one of this process."""
        token = self.alive.token_of_duplicate(current_caller(), raw)
        if self.siblings is not None and not token:
            return await self.siblings.claim_or_find(current_caller(), raw)
        return token or ""

    async def abort(self, names: Collection[str], *, of_any_tenant: bool = False) -> list[str]:
        """See `AliveRequests.abort_of`. A request may be that of a sibling."""
        caller = current_caller()
        aborted = self.alive.abort_of(caller, names, of_any_tenant)
        if self.siblings is None:
            return aborted
        others = await self.siblings.ask_others("abort", caller, list(names), of_any_tenant)
        found = {*aborted, *chain.from_iterable(others)}
        return [name for name in dict.fromkeys(names) if name in found]

    def max_running(self, model: str = "") -> int:
        """See `Router.max_running`."""
        return self._router.max_running(model)

    def max_choices(self, model: str) -> int:
        """See `Router.max_choices`."""
        return self._router.max_choices(model)

    @property
    def text_model(self) -> TextModel:
        """The text side of the models that are served here.

        Raises:
            EngineUnavailable: It is being loaded.
        """
        if self._text_model is None:
            raise EngineUnavailable(self.why_not_ready)
        return self._text_model

    async def drain(self, drain_s: float) -> int:
        """Refuse new requests, and let the running ones end or go on elsewhere, as `Departure` does."""
        self._is_draining = True
        self._router.on_change()
        return await Departure(self._router, self.alive).run(drain_s)

    async def prepare(self, raw: RawRequest, request_id: str, record: RequestRecord) -> PreparedRequest:
        text = self.text_model
        terms = self._router.find(
            raw.model, raw.path("model"), adapter=raw.adapter, adapter_path=raw.path("adapter")
        )
        record.note_model(terms.model.name)
        if raw.pooling is not None:
            return await prepare_pooled(raw, raw.pooling, request_id, terms, text)
        check_task(terms.model, GENERATION)
        return await prepare(raw, request_id, terms, text, self._max_biases)

    def _set_deadline_timer(
        self, raw: RawRequest, record: RequestRecord, outputs: RequestOutputs
    ) -> asyncio.TimerHandle | None:
        """End the request at its deadline, in whatever state it is."""
        if raw.deadline_s is None:
            return None
        error = DeadlineExceeded(f"the deadline of {raw.deadline_s:g} s has passed")
        if record.elapsed_s >= raw.deadline_s:
            raise error
        loop = asyncio.get_running_loop()
        return loop.call_later(raw.deadline_s - record.elapsed_s, outputs.fail, error)

    def _served(self, facts: ModelFacts) -> ServedModel:
        text = self._text_model
        only_pools = GENERATION not in facts.tasks
        return ServedModel(
            facts.name,
            longest_text(facts, text) if text is not None and only_pools else facts.max_model_len,
            facts.vocab_size,
            self._started_unix_s,
            facts.eos_token_ids,
            facts.identity.fingerprint,
            text is not None and text.tokenizer.chat_template is not None,
            text is not None and "tool_calls" in text.formats,
            self._router.aliases_of(facts.name),
            MappingProxyType({} if text is None else text.defaults),
            self._router.max_running(facts.name),
            facts.tasks,
            facts.num_labels,
            facts.embedding_size,
        )

    def _with_adapter(self, terms: ModelTerms) -> ServedModel:
        """Return a model, under the name of its adapter if there is one."""
        served = self._served(terms.model)
        if terms.adapter is None:
            return served
        return served._replace(
            name=terms.name, base_model=served.name, aliases=(), fingerprint=terms.fingerprint
        )


def _admitted(request: PreparedRequest, outputs: RequestOutputs) -> AdmittedEvent:
    return AdmittedEvent(
        request.head.request_id,
        request.terms.name,
        request.seed,
        request.prompt_token_ids,
        request.is_limited_by_context,
        fingerprint=request.fingerprint,
        resume_token=outputs.resume_token,
        not_enforced=request.not_enforced,
    )


async def _outputs_of(
    request: PreparedRequest | AttachedStream,
    outputs: RequestOutputs,
    record: RequestRecord,
    receiver: EventReceiver | None,
) -> AsyncGenerator[Event, None]:
    """The events between the first and the last one, while they are recorded."""
    is_streamed = request.sampling.output_kind is not OutputKind.FINAL_ONLY
    outputs.on_delta = record.note_output if is_streamed else None
    if receiver is not None:
        await outputs.deliver_to(receiver)
    else:
        while (event := await outputs.next_event()) is not None:
            yield event
    if not is_streamed and outputs.first_token_ns:
        record.note_first_token(outputs.first_token_ns)


def _finish(
    request: PreparedRequest | AttachedStream, outputs: RequestOutputs, record: RequestRecord
) -> FinishedEvent:
    """Record how a request has ended, and return its last event."""
    _record_outputs(request, outputs, record)
    record.finish = outputs.finish_words
    for choice in outputs.choices:
        reason = choice.finish_reason.word if choice.finish_reason is not None else ""
        record.note_choice(reason, choice.num_tokens, choice.timings)
    return FinishedEvent(
        record.usage, outputs.timings, request.tokenize_ns, record.num_moves, outputs.is_exact
    )


def _record_outputs(
    request: PreparedRequest | AttachedStream, outputs: RequestOutputs, record: RequestRecord
) -> None:
    """Record what has come of a request so far, and where it was computed."""
    record.usage = Usage(
        len(request.prompt_token_ids),
        outputs.num_tokens,
        outputs.num_cached_tokens,
        outputs.num_reasoning_tokens,
    )
    record.note_outputs(outputs)
