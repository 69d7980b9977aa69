"""A request's outputs: what its choices have for the client, and how the request ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from triptych.errors import EngineUnavailable, GenerationLost, InvalidRequest
from triptych.text.tokenizer import Tokenizer
from triptych.types.events import DeltaEvent, PromptLogprobsEvent, ResumableEvent
from triptych.types.outputs import StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.prefill import RemotePrefill
from triptych_services.frontend.requests.tools import AnswerSplit
from triptych_services.frontend.streams.choice import Choice, ChoiceListener
from triptych_services.frontend.streams.logprobs import PromptReport
from triptych_services.frontend.streams.pacing import Pace
from triptych_services.frontend.streams.route import ChoiceRoute, RetainedStream

_CHOICES_NAMED = 8  # in an error's message


OutputEvent: TypeAlias = PromptLogprobsEvent | DeltaEvent | ResumableEvent


class HandedOver(EngineUnavailable):
    """The stream ends here and goes on at another frontend. It is kept until its client comes there."""


class EventReceiver(Protocol):
    """Takes events as they come, in the turn of the loop that brings them, without a task that waits for each."""

    on_ready: Callable[[], None]
    """Called when it has become ready again. Set by the outputs that it receives."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes an event now. Otherwise events wait, and deltas are merged."""

    def take(self, event: OutputEvent) -> None:
        """Take an event. An error that it raises ends the request."""


def _do_nothing() -> None:
    pass


class RequestOutputs(ChoiceListener):
    """All choices of one request. Filled by the engine's batches, emptied by the one client that waits.

    A client that lags costs nothing but the memory of its own output: each choice holds one pending
    delta, into which everything new is merged.
    """

    def __init__(self, request_id: str, pace: Pace | None = None) -> None:
        """`pace`: of all streams. None: output leaves as it comes."""
        self.request_id = request_id
        self.pace = pace
        self.choices: list[Choice] = []
        self.routes: Sequence[ChoiceRoute] = ()
        """[num_choices] the ways of the choices through engines. Empty until all choices are there."""
        self._prefill: RemotePrefill | None = None
        self.retained: RetainedStream | None = None
        """The request as its engine keeps it for other frontends. Set at submission; None: it is not kept."""
        self._knows_token = False
        """The client has its token, up to the last move."""
        self.path_of: Callable[[str], str] = str
        """Returns the path of a field in the client's words. Set when these are known."""
        self._has_moved = False
        """It has moved to another engine, and its client does not have the new token yet."""
        self._num_admitted = 0
        self._num_open = 0
        self._is_aborted = False
        self._is_failed = False
        self._error: Exception | None = None
        """The error that has ended it, until it is raised."""
        self._report: PromptReport | None = None
        self._ready: deque[Choice] = deque()  # choices with something to take, in order of arrival
        self.on_delta: Callable[[int, int], None] | None = None
        """Called with the index of a choice and its new tokens before they leave. None: of no interest."""
        self._receiver: EventReceiver | None = None
        """Takes the events as they come. None: they wait for `next_event`."""
        self._news = asyncio.Event()

    def add_choice(
        self,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | U32,
        echo: str,
        *,
        index: int | None = None,
        min_interval_tokens: int = 0,
        split: AnswerSplit | None = None,
    ) -> Choice:
        """Add a choice, to be submitted now, by default with the next index.

        Args:
            echo: Stands at the head of its text.
            min_interval_tokens: New tokens to gather before they are sent.
            split: How its text is split into parts; None: it stays one text.
        """
        index = len(self.choices) if index is None else index
        report = None if self.choices else self._report
        choice = Choice(
            self, index, sampling, tokenizer, prompt_token_ids, echo, report, min_interval_tokens, split
        )
        self.choices.append(choice)
        self._num_open += 1
        return choice

    def send_by(self, routes: Sequence[ChoiceRoute], prefill: RemotePrefill | None = None) -> None:
        """Let each choice be computed where its route leads.

        Args:
            routes: [num_choices] of the choices in their order.
            prefill: The prompt as another engine computes it. None: none does.
        """
        self.routes, self._prefill = routes, prefill

    def start_over(self) -> None:
        """Forget all choices after an engine has refused them, so that another can be asked."""
        self.close()
        self.choices.clear()
        self.routes = ()
        self._ready.clear()
        self._num_admitted = self._num_open = 0
        self._is_failed, self._error = False, None

    async def wait_admitted(self) -> None:
        """Until the engine has every choice; raises what has ended the request instead.

        An engine need not hear of a request that is aborted.
        """
        while self._num_admitted < len(self.choices) and not self._is_aborted:
            self._raise_error()
            await self._wait()
        self.end_if_aborted()

    def end_if_aborted(self) -> None:
        """End the choices, if someone has asked for that before they were at an engine."""
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """End all choices with what they have, at someone's request; those to come will end at once."""
        self._is_aborted = True
        for route in self.routes:
            route.end_by_abort()
        for choice in self.choices:  # those without a route are stopped as soon as they have one
            choice.end_by_abort()
        self._news.set()

    def expect_prompt(self, report: PromptReport) -> None:
        """Report the prompt's log-probabilities before any output; called before the first choice is added."""
        self._report = report

    def note_moved(self) -> None:
        """Note that a choice has moved to another engine."""
        if self.retained is not None:
            self._has_moved = True
            self._news.set()

    @property
    def resume_token(self) -> str:
        """The client's token of this request as it runs now; empty if it cannot go on elsewhere."""
        return "" if self.retained is None else self.retained.token

    @property
    def can_go_on_at(self) -> EngineClient | None:
        """The engine at which another frontend can go on where the client is, who knows how. None: none can now."""
        knows_how = self._knows_token and not self._has_moved
        return self.retained.engine if self.retained is not None and knows_how else None

    def hand_over(self) -> None:
        """Leave the request at its engine, and end it here: the client goes on at another frontend."""
        if self.retained is not None:
            self.retained.detach()
            self.fail(HandedOver("this frontend is stopping; go on with the stream at another one"))

    async def next_event(self) -> OutputEvent | None:
        """Return the next unsent part of the prompt, then of a choice, or None once everything has been taken.

        Raises:
            what has ended the request, after everything that came before it.
        """
        self._knows_token = True  # the event before was sent, and it may have been the one that tells it
        while (event := self._take_event()) is None:
            self._raise_error()
            if self._num_open == 0:
                return None
            await self._wait()
        return event

    async def deliver_to(self, receiver: EventReceiver) -> None:
        """Give a receiver everything as it comes; return once it has taken all.

        Raises:
            what has ended the request, after everything that came before it, or what the receiver raises.
        """
        self._receiver, receiver.on_ready = receiver, self._go_on_delivering
        self._knows_token = True  # as in `next_event`
        try:
            while True:
                self._deliver()
                if receiver.is_ready or self._receiver is None:  # it has taken all, or failed
                    self._raise_error()
                    if self._num_open == 0:
                        return
                await self._wait()
        finally:
            self._receiver, receiver.on_ready = None, _do_nothing

    def _go_on_delivering(self) -> None:
        self._deliver()
        self._news.set()  # an error, or the end, may have waited behind the last event

    def _deliver(self) -> None:
        """Give the receiver what is there and it takes now."""
        receiver = self._receiver
        if receiver is None:
            return
        try:
            while receiver.is_ready and (event := self._take_event()) is not None:
                receiver.take(event)
                self._knows_token = True
        except Exception as error:  # a bug in one request's events ends that request
            self._receiver = None
            self._is_failed, self._error = True, error
            self._news.set()

    def _take_event(self) -> OutputEvent | None:
        """Return the next event, or None if there is none now."""
        report = self._report
        if report is not None and (part := report.take()) is not None:
            return part
        if self._has_moved and self.retained is not None:
            self._has_moved = self._knows_token = False
            return ResumableEvent(self.resume_token)
        if self._ready and (report is None or report.is_complete):
            delta = self._ready.popleft().take()
            if self.on_delta is not None:
                self.on_delta(delta.index, len(delta.token_ids))
            return delta
        return None

    def fail(self, error: Exception) -> None:
        """End the request; the first error counts, and none after the last choice is complete.

        What the pace has held back leaves before it: an error counts those tokens, and clients go on behind them.
        """
        if not self._is_failed and any(choice.finish_reason is None for choice in self.choices):
            for choice in self.choices:
                if choice.is_held:
                    choice.release()
            self._is_failed, self._error = True, _in_words_of_client(error, self.path_of)
            self.close()
            self._news.set()

    def fail_by_loss(self, why: str) -> None:
        """End the request because its engine is gone. Called for each choice; only the first call matters."""
        if self._is_failed:
            return
        is_admitted = self._num_admitted == len(self.choices)  # before, the client has seen nothing
        if not is_admitted or not self.num_tokens:
            self.fail(EngineUnavailable(f"{why} before any output of request {self.request_id}; try again"))
            return
        shown = self.choices[:_CHOICES_NAMED]
        counts = ", ".join(f"{choice.num_tokens} of choice {choice.index}" for choice in shown)
        if len(self.choices) > len(shown):
            counts += f", … ({len(self.choices)} choices)"
        self.fail(
            GenerationLost(
                f"{why} after these output tokens of request {self.request_id}: {counts}; to go on from there, "
                "send prompt and output together as a new prompt"
            )
        )

    def close(self) -> None:
        """Abort upstream the choices that still run, and take nothing more of any. Safe at any time, more than once."""
        self.retained = None
        prefill, self._prefill = self._prefill, None
        for route in self.routes:
            route.abort()
        if prefill is not None:
            prefill.abort()
        for choice in self.choices:
            choice.close()

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended it, which its client may not know yet."""
        return self._is_failed

    @property
    def num_moves(self) -> int:
        """Return how many times the choice that moved most has moved to another engine."""
        return max((route.num_moves for route in self.routes), default=0)

    @property
    def engine_names(self) -> list[str]:
        """Return the engines that choices were submitted to, each once."""
        return list(dict.fromkeys(name for route in self.routes for name in route.engine_names))

    @property
    def is_exact(self) -> bool:
        """Return whether all choices went on as if they had not moved."""
        return all(route.is_exact for route in self.routes)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Return the cached prompt tokens: the minimum over choices, since later ones find the first's blocks."""
        return min((c.num_cached_tokens for c in self.choices if c.num_cached_tokens is not None), default=0)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def timings(self) -> StageTimings:
        """Return the times of the slowest choice, and the guesses of all."""
        return StageTimings.of_all([choice.timings for choice in self.choices])

    @property
    def first_token_ns(self) -> int:
        """Time from the engine's acceptance to the first token of any choice; 0 if the engine has not reported it."""
        times = (choice.timings.queued_ns + choice.timings.prefill_ns for choice in self.choices)
        return min((ns for ns in times if ns), default=0)

    @property
    def finish_words(self) -> str:
        """How the choices ended, for logs and metrics: `stop`, or `length+stop`."""
        return "+".join(sorted({c.finish_reason.word for c in self.choices if c.finish_reason is not None}))

    def note_admitted(self) -> None:
        self._num_admitted += 1
        self._news.set()

    def note_prompt(self) -> None:
        self._news.set()

    def note_ready(self, choice: Choice) -> None:
        self._ready.append(choice)
        if self._receiver is None:
            self._news.set()
        else:
            self._deliver()

    def note_settled(self) -> None:
        self._num_open -= 1
        self._news.set()

    def _raise_error(self) -> None:
        """Raise what has ended the request, if anything has. It is not kept, because it refers to its raisers."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


def _in_words_of_client(error: Exception, path_of: Callable[[str], str]) -> Exception:
    """Return an engine's refusal with the paths of the fields as the client wrote them."""
    if not isinstance(error, InvalidRequest):
        return error
    found = [replace(each, field=path_of(each.field.removeprefix("sampling."))) for each in error.violations]
    return type(error)(found)
