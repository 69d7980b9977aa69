"""One choice on its way through engines: what has come of it, and what it takes to go on elsewhere."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from triptych.errors import EngineUnavailable, QueueFull
from triptych.types.facts import ModelFacts
from triptych.types.identity import Likeness, compare
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import FinishedRequest, StageTimings
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32
from triptych.types.submit import ModelTerms, RequestHead, RequestNeeds, SubmitRequest
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import ChoiceOutput, EngineLoss
from triptych_services.frontend.routing.prefix_index import RoutedPrompt
from triptych_services.frontend.streams.choice import Choice
from triptych_services.frontend.streams.resume import Retention

# After a stop string the engine is asked to end the request. It answers within a turn of its loop, with the counts
# that only it knows. The text is complete by then, so an engine that does not answer delays the end of the stream
# by no more than this; the timings are 0 then.
ACCOUNT_WAIT_S = 0.25
_PROBATION = 32
"""Tokens after which the engines that a choice has lost are forgotten: it is not the reason, or not of all."""


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """One client's request, with all that an engine must know to compute its choices."""

    head: RequestHead
    wanted: ModelTerms
    """The facts that the request was checked against."""
    prompt_token_ids: U32
    sampling: SamplingParams
    """As the engine takes them."""
    deadline: float | None = None
    """On the monotonic clock. None: there is none."""
    whole_output: bool = False
    routed: RoutedPrompt | None = None
    """The prompt as the router looks at it. None: it plays no part."""
    kv_source: KvSource | None = None
    """The place at which its first engine can pull the prompt's blocks. None: there is none."""
    retention: Retention | None = None
    """How it is kept for other frontends. None: not at all."""

    def to_request(
        self, numbers: Sequence[int], routes: Sequence[ChoiceRoute], moved_to: ModelFacts | None = None
    ) -> SubmitRequest:
        """Return the message that has an engine begin some choices, or go on with them.

        Args:
            routes: [num_choices] of one request, by index, all of them admitted before or none.
            moved_to: The model that was found fit to go on with their output. None: they have none of an engine.
        """
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and not routes[0].awaits_prompt:
            sampling = replace(sampling, prompt_logprobs=None)
        emitted = tuple(np.array(route.emitted, np.uint32) for route in routes)
        is_moved = routes[0].is_admitted
        cached_tokens = [route.choice.num_cached_tokens for route in routes] if is_moved else []
        return SubmitRequest(
            head=self.head,
            numbers=np.array(numbers, np.uint32),
            seeds=np.array([route.seed for route in routes], np.uint64),
            prompt_token_ids=self.prompt_token_ids,
            emitted=emitted if any(map(len, emitted)) else (),
            sampling=sampling,
            deadline_remaining_ms=self._remaining_ms(),
            whole_output=self.whole_output,
            num_engine_deaths=max(route.num_deaths for route in routes),
            is_moved=is_moved,
            kv_source=None if is_moved else self.kv_source,
            cached_tokens=tuple(cached_tokens),
            model_digest="" if moved_to is None else moved_to.identity.digest,
            **({} if self.retention is None else self.retention.renew(len(routes))),
        )

    def _remaining_ms(self) -> int | None:
        if self.deadline is None:
            return None
        return max(1, round((self.deadline - time.monotonic()) * 1000))


class RouteChange(Enum):
    """A change that a route reports to the owner of the choices that have lost their engine."""

    BEGUN = auto()
    """The choice is at an engine."""
    DIED = auto()
    """The engine has died while the choice, which may be the reason, was computed there. LOST follows."""
    LOST = auto()
    """The engine is gone; `loss` says why."""
    RELEASED = auto()
    """The engine cannot end the choice in time, and would give it to another one."""
    ANSWERED = auto()
    """The engine that the choice was moved to has answered its submission."""
    REFUSED = auto()
    """The engine that the choice was moved to has no place for it."""
    LEFT = auto()
    """The choice needs no other engine."""


class ChoiceRoute:
    """One choice's way through one engine after another; the sink of all its submissions.

        submitted ──► admitted ──► tokens ──► end
            ▲                        │ the engine is lost, or releases it
            └──────── moved ◄────────┘

    Stop strings, text and log-probabilities that were delivered stay in the choice: an engine needs the tokens only.
    Penalties, limits and grammars count from the prompt's end, and random numbers depend on seed and position.
    """

    def __init__(
        self,
        submission: Submission,
        choice: Choice,
        on_change: Callable[[ChoiceRoute, RouteChange], None],
        *,
        seed: int,
        emitted: Sequence[int] = (),
    ) -> None:
        """
        Args:
            on_change: Called with each change, as `Migrator.on_change`.
            emitted: Tokens of the choice that the client has had before.
        """
        self.submission = submission
        self.choice = choice
        self.seed = seed
        self.emitted: array[int] = array("I", emitted)
        """All output tokens so far."""
        self.engine: EngineClient | None = None
        """The engine that computes it; None while it waits for one."""
        self.facts: ModelFacts | None = None
        """Facts of the engine that computes it, or did last."""
        self.is_admitted = False
        """An engine has taken it, and its client knows."""
        self.num_losses = 0
        """Engines lost since it last went on for a while."""
        self.num_deaths = 0
        """Those of them that died when they had computed something of it, or had not answered its submission."""
        self.most_together = 0
        """Suspected requests that may be at one engine, its own included. 0: it is no suspect (`DeathInquiry`)."""
        self.loss = EngineLoss("")
        """The last one."""
        self.lost_at = 0.0
        self.not_before = 0.0
        """When it may be submitted again. This and the one before are on the monotonic clock, while it waits."""
        self.refused_by: set[EngineClient] = set()
        """Engines not to be asked again now."""
        self.is_unanswered = False
        """It was moved, and its engine has not answered yet."""
        self.num_moves = 0
        """Times that it has moved to another engine."""
        self.engine_names: list[str] = []
        """Engines that it was submitted to, in turn."""
        self.is_exact = True
        """It goes on as if it had not moved: the engines that it has come to compute the same bits."""
        self._on_change = on_change
        self._is_stopping = False
        """It was ended early, and its engine is waited for."""
        self._was_computed = False
        """Its engine has sent something of it beside its admission."""
        self.number = 0
        """Its name at its engine."""
        self._cleared_at = 0
        self._started_ns = time.monotonic_ns()
        self._first_token_ns: int | None = None

    @property
    def awaits_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.choice.awaits_prompt

    def likeness_of(self, facts: ModelFacts) -> Likeness:
        """Return how much of another engine's model is alike to that which has computed the output so far."""
        return (
            Likeness.NOTHING if self.facts is None else compare(self.facts.identity, facts.identity).likeness
        )

    @property
    def needs(self) -> RequestNeeds:
        """The demands on an engine that it goes on at. The choices of a new request go to one engine together."""
        submission = self.submission
        assert submission.sampling.max_tokens is not None, "it is filled in before a submission"
        num_tokens = len(submission.prompt_token_ids) + submission.sampling.max_tokens
        num_choices = 1 if self.is_admitted else submission.sampling.n
        return RequestNeeds(num_tokens, num_choices, submission.head.priority != 0)

    def begin(self, engine: EngineClient, number: int, *, is_moved: bool = False) -> None:
        """Note that it was submitted to an engine, under this number."""
        facts = None if engine.welcome is None else engine.welcome.model
        if is_moved:
            self.is_unanswered = True
            self._cleared_at = len(self.emitted) + _PROBATION
            is_exact = facts is not None and self.likeness_of(facts) is Likeness.TOKENS
            self.num_moves += 1
            self.is_exact &= is_exact or not self.emitted
            self.choice.note_moved()
        self.engine_names.append(engine.name)
        self.engine, self.number, self.facts = engine, number, facts
        self._on_change(self, RouteChange.BEGUN)
        self._was_computed = False

    def stop_early(self) -> None:
        """End it at its engine, and wait a moment for the engine's counts."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self.engine is not None:
            self.engine.stop(self.number, self)
            asyncio.get_running_loop().call_later(ACCOUNT_WAIT_S, self.choice.settle)
        else:
            self._leave_unaccounted()

    def end_by_abort(self) -> None:
        """End it with what it has; its engine is asked for its counts."""
        self.choice.end_by_abort()
        if not self.choice.is_settled:
            self.stop_early()

    def abort(self) -> None:
        """End it at its engine, and take nothing more of it. Safe at any time."""
        self.leave_engine()
        self._on_change(self, RouteChange.LEFT)

    def detach(self) -> None:
        """Leave it at its engine, with the choices that were submitted with it, and take nothing more of it."""
        self._note_answer()
        self.engine = None
        self._on_change(self, RouteChange.LEFT)

    def leave_engine(self) -> None:
        """End it at its engine, to go on elsewhere or not at all."""
        if self.engine is not None:
            self.engine.abort(self.number, self)
            self._note_answer()
            self.engine = None

    def on_output(self, output: ChoiceOutput) -> None:
        choice, finish = self.choice, output.finish
        if self.is_unanswered:
            self._note_answer()
        if output.token_ids or finish is not None:
            self.is_admitted = self._was_computed = True
            if self._first_token_ns is None:
                self._first_token_ns = time.monotonic_ns()
            self.emitted.extend(output.token_ids)
            if self.num_losses and len(self.emitted) >= self._cleared_at:
                self.num_losses = self.num_deaths = self.most_together = 0
            if finish is not None and self.num_moves:
                output = output._replace(finish=self._whole_account(finish))
        elif not self._take_news(output):
            return
        choice.on_output(output)
        if choice.finish_reason is not None and finish is None:
            self.stop_early()

    def _take_news(self, output: ChoiceOutput) -> bool:
        """Take an output without tokens, and return whether it says something to the choice."""
        if output.is_released:
            if self.choice.finish_reason is None:
                self._on_change(self, RouteChange.RELEASED)
            return False
        if output.num_cached_tokens is not None:
            if self.choice.num_cached_tokens is None:  # else it has had tokens of an engine before
                self.choice.num_cached_tokens = output.num_cached_tokens
            return False
        if output.prompt_logprobs is not None:
            self.is_admitted = self._was_computed = True
            return True
        self.refused_by.clear()
        is_new, self.is_admitted = not self.is_admitted, True
        return is_new

    def on_end(self, why: Exception | EngineLoss) -> None:
        is_refusal = self.is_unanswered and self.is_admitted
        is_answered = self.is_admitted and not self.is_unanswered
        is_complete = self.choice.finish_reason is not None
        if isinstance(why, EngineLoss):
            self.loss = why
            if why.is_death and (self._was_computed or not is_answered):
                self.num_deaths += 1
                self._on_change(self, RouteChange.DIED)
        self._note_answer()
        engine, self.engine = self.engine, None
        if isinstance(why, EngineLoss):
            if is_complete:
                self._leave_unaccounted()
            else:
                self._on_change(self, RouteChange.LOST)
            return
        if is_refusal and engine is not None:
            self.refused_by.add(engine)
        if is_refusal and not is_complete and isinstance(why, QueueFull | EngineUnavailable):
            self._on_change(self, RouteChange.REFUSED)
        elif self.is_admitted and not is_refusal and not is_complete and isinstance(why, EngineUnavailable):
            self.loss = EngineLoss(str(why))
            self._on_change(self, RouteChange.LOST)
        else:
            self.choice.on_end(why)

    def _note_answer(self) -> None:
        if self.is_unanswered:
            self._on_change(self, RouteChange.ANSWERED)
            self.is_unanswered = False

    def _leave_unaccounted(self) -> None:
        """Let the choice end, which is complete, without the counts that only an engine knows."""
        self._on_change(self, RouteChange.LEFT)
        self.choice.settle()

    def _whole_account(self, finish: FinishedRequest) -> FinishedRequest:
        """Return the end with the times of all engines, as they were seen here, and the cached tokens of the first."""
        assert self._first_token_ns is not None, "a token, or the end, has come"
        timings = StageTimings(
            prefill_ns=self._first_token_ns - self._started_ns,
            decode_ns=time.monotonic_ns() - self._first_token_ns,
        )
        num_cached_tokens = self.choice.num_cached_tokens
        if num_cached_tokens is None:  # the first engine is of the version before, and did not say
            num_cached_tokens = finish.num_cached_tokens
        return replace(finish, timings=timings, num_cached_tokens=num_cached_tokens)


@dataclass(frozen=True, slots=True)
class RetainedStream:
    """A request that its engine keeps for other frontends, as it runs now."""

    retention: Retention
    routes: Sequence[ChoiceRoute]

    @property
    def engine(self) -> EngineClient | None:
        """The engine that can let another frontend go on with all of it. None: none can now."""
        engines = {route.engine for route in self.routes if route.choice.finish_reason is None}
        return engines.pop() if len(engines) == 1 and self.retention.secret else None

    @property
    def token(self) -> str:
        """The client's token; empty if it cannot go on elsewhere."""
        engine = self.engine
        return "" if engine is None else self.retention.token(engine.name)

    def detach(self) -> None:
        """Leave it at its engine for another frontend, and take nothing more of it."""
        if (engine := self.engine) is not None:
            sink_of = {route.number: route for route in self.routes if route.engine is engine}
            engine.detach(list(sink_of), sink_of)
            for route in sink_of.values():
                route.detach()
