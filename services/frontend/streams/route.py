"""One choice on its way through engines: what has come of it, and what it takes to go on elsewhere."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from triptych.errors import EngineUnavailable, QueueFull
from triptych.types.facts import ModelFacts
from triptych.types.identity import Likeness, compare
from triptych.types.kv_transfer import KvSource
from triptych.types.outputs import FinishedRequest
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import SamplingParams
from triptych.types.step import U32, RequestGuesses
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
    pooling: PoolingParams | None = None
    """How it becomes vectors. None: it generates."""

    @property
    def needs(self) -> RequestNeeds:
        """The demands on an engine of all its choices together."""
        sampling = self.sampling
        assert sampling.max_tokens is not None, "it is filled in before a submission"
        has_priority = self.head.priority != 0
        if self.pooling is not None:
            return RequestNeeds(len(self.prompt_token_ids), 1, has_priority, self.pooling.task.label)
        num_tokens = len(self.prompt_token_ids) + sampling.max_tokens
        return RequestNeeds(num_tokens, sampling.n, has_priority)

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
        guesses = {
            number: route.guesses for number, route in zip(numbers, routes, strict=True) if any(route.guesses)
        }
        return SubmitRequest(
            head=self.head,
            numbers=np.array(numbers, np.uint32),
            seeds=np.array([route.seed for route in routes], np.uint64),
            prompt_token_ids=self.prompt_token_ids,
            emitted=emitted if any(map(len, emitted)) else (),
            sampling=sampling,
            deadline_remaining_ms=self._remaining_ms(),
            pooling=self.pooling,
            whole_output=self.whole_output,
            num_engine_deaths=max(route.num_deaths for route in routes),
            is_moved=is_moved,
            kv_source=None if is_moved else self.kv_source,
            cached_tokens=tuple(cached_tokens),
            guesses=RequestGuesses.of(guesses),
            adapter="" if self.wanted.adapter is None else self.wanted.adapter.name,
            adapter_digest=self.wanted.adapter_digest,
            model_digest="" if moved_to is None else moved_to.identity.digest,
            **({} if self.retention is None else self.retention.renew(len(routes))),
        )

    def _remaining_ms(self) -> int | None:
        if self.deadline is None:
            return None
        return max(1, round((self.deadline - time.monotonic()) * 1000))


class RouteState(Enum):
    """How far an engine has come with a choice, as this frontend knows.

        NEW ──admitted──► ADMITTED ──output──► RUNNING
         │                 │    ▲               │   ▲
    lost │  lost, released │    │ answered      │   │ answered, by output
         ▼                 ▼    │               ▼   │
        ┌────────────────────── MOVING ─────────────────┐
        │ waits ────────────── begin ──────► unanswered │      From each of these four to ENDED,
        │   ▲                                    │      │      from each that has an engine to DETACHED.
        │   └────────── lost, refused ───────────┘      │
        └───────────────────────────────────────────────┘

    That a choice is complete is a fact of the choice. Its way goes on until an engine has accounted for it, and until
    then the loss of that engine means the same as before.
    """

    NEW = auto()
    """No engine has admitted it, and its client knows nothing. Its engine moves it on, by an output or its loss."""
    ADMITTED = auto()
    """Its engine has it and has sent nothing computed, so it is not blamed for a death. Its engine moves it on."""
    RUNNING = auto()
    """Its engine has sent tokens of it, or log-probabilities of its prompt. Its engine moves it on."""
    MOVING = auto()
    """It has lost an engine. Without another it waits, and the migrator gives it one by `begin`. With another it is
    unanswered, and that one moves it on: by an output, by its refusal or by its loss."""
    DETACHED = auto()
    """Its engine has it for another frontend. Nothing moves it on."""
    ENDED = auto()
    """No engine has it: it is accounted for, or has failed, or its request is over. Nothing moves it on."""


_TAKEN = (RouteState.ADMITTED, RouteState.RUNNING)
"""States in which its engine has taken it."""
_OVER = (RouteState.DETACHED, RouteState.ENDED)
"""States that nothing follows."""
_NEXT: Mapping[RouteState, Collection[RouteState]] = {
    RouteState.NEW: (RouteState.ADMITTED, RouteState.RUNNING, RouteState.MOVING, *_OVER),
    RouteState.ADMITTED: (RouteState.RUNNING, RouteState.MOVING, *_OVER),
    RouteState.RUNNING: (RouteState.MOVING, *_OVER),
    RouteState.MOVING: (RouteState.ADMITTED, RouteState.RUNNING, RouteState.MOVING, *_OVER),
    RouteState.DETACHED: (),
    RouteState.ENDED: (),
}
"""State -> those that may follow it."""


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
    """One choice's way through one engine after another, by the states of `RouteState`. The sink of its submissions.

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
        self.state = RouteState.NEW
        """Written by `_become` alone."""
        self.engine: EngineClient | None = None
        """The engine that has it. None: it waits for one, or its way is over."""
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
        self.num_moves = 0
        """Times that it has moved to another engine."""
        self.engine_names: list[str] = []
        """Engines that it was submitted to, in turn."""
        self.guesses = 0, 0
        """Guesses of its engines so far that were accepted, and that were rejected."""
        self.is_exact = True
        """It goes on as if it had not moved: the engines that it has come to compute the same bits."""
        self._on_change = on_change
        self._is_stopping = False
        """It was ended early, and its engine is waited for."""
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
        needs = self.submission.needs
        return needs._replace(num_choices=1) if self.is_admitted else needs

    def begin(self, engine: EngineClient, number: int) -> None:
        """Note that it was submitted to an engine, under this number: the first one, or one that it has moved to."""
        assert self.state in (RouteState.NEW, RouteState.MOVING), f"it is {self.state.name}"
        assert self.engine is None, "it has left no engine"
        facts = None if engine.welcome is None else engine.welcome.model
        if self.state is RouteState.MOVING:
            self._cleared_at = len(self.emitted) + _PROBATION
            is_exact = facts is not None and self.likeness_of(facts) is Likeness.TOKENS
            self.num_moves += 1
            self.is_exact &= is_exact or not self.emitted
            self.choice.note_moved()
        self.engine_names.append(engine.name)
        self.engine, self.number, self.facts = engine, number, facts
        self._on_change(self, RouteChange.BEGUN)

    def take_up(self, engine: EngineClient, number: int) -> None:
        """Note that an engine has it under this number and its client knows: it began at another frontend."""
        self.begin(engine, number)
        self._become(RouteState.ADMITTED)

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
        if self.engine is not None:
            self.engine.abort(self.number, self)
        if self._become(RouteState.ENDED):
            self._on_change(self, RouteChange.LEFT)

    def detach(self) -> None:
        """Leave it at its engine, with the choices that were submitted with it, and take nothing more of it."""
        if self._become(RouteState.DETACHED):
            self._on_change(self, RouteChange.LEFT)

    def leave_engine(self) -> None:
        """End it at its engine, to go on elsewhere."""
        assert self.engine is not None, "it has none"
        self.engine.abort(self.number, self)
        self._become(RouteState.MOVING)

    def on_output(self, output: ChoiceOutput) -> None:
        if output.guesses is not None:  # counts only
            self.guesses = output.guesses
            return
        choice, finish, was_admitted = self.choice, output.finish, self.is_admitted
        has_tokens = bool(output.token_ids) or finish is not None
        is_computed = has_tokens or output.prompt_logprobs is not None
        state = RouteState.RUNNING if is_computed else RouteState.ADMITTED
        if self.state is not state and self.state is not RouteState.RUNNING and not self._become(state):
            return
        if has_tokens:
            if self._first_token_ns is None:
                self._first_token_ns = time.monotonic_ns()
            self.emitted.extend(output.token_ids)
            if self.num_losses and len(self.emitted) >= self._cleared_at:
                self.num_losses = self.num_deaths = self.most_together = 0
            if finish is not None and self.num_moves:
                output = output._replace(finish=self._whole_account(finish))
        elif output.is_released:
            if choice.finish_reason is None:
                self._on_change(self, RouteChange.RELEASED)
        elif output.num_cached_tokens is not None:
            if choice.num_cached_tokens is None:  # else it has had tokens of an engine before
                choice.num_cached_tokens = output.num_cached_tokens
        elif not is_computed:
            self.refused_by.clear()
        if was_admitted and not is_computed:
            return  # it says nothing to the choice
        choice.on_output(output)
        if finish is not None:
            if self.engine is None:  # it was released, and this was on its way
                self._on_change(self, RouteChange.LEFT)
            self._become(RouteState.ENDED)
        elif choice.finish_reason is not None:
            self.stop_early()

    def on_end(self, why: Exception | EngineLoss) -> None:
        engine, state = self.engine, self.state
        if engine is None:
            return  # it has left: a session that is lost says so to all choices that it had
        is_complete = self.choice.finish_reason is not None
        if isinstance(why, EngineLoss):
            self.loss = why
            if why.is_death and state is not RouteState.ADMITTED:
                self.num_deaths += 1
                self._on_change(self, RouteChange.DIED)
            if is_complete:
                self._leave_unaccounted()
            else:
                self._become(RouteState.MOVING)
                self._on_change(self, RouteChange.LOST)
            return
        is_refusal = state is RouteState.MOVING and self.is_admitted
        if is_refusal:
            self.refused_by.add(engine)
        if is_refusal and not is_complete and isinstance(why, QueueFull | EngineUnavailable):
            self._become(RouteState.MOVING)
            self._on_change(self, RouteChange.REFUSED)
        elif state in _TAKEN and not is_complete and isinstance(why, EngineUnavailable):
            self.loss = EngineLoss(str(why))
            self._become(RouteState.MOVING)
            self._on_change(self, RouteChange.LOST)
        else:
            self._become(RouteState.ENDED)
            self.choice.on_end(why)

    def _leave_unaccounted(self) -> None:
        """Let the choice end, which is complete, without the counts that only an engine knows."""
        if self._become(RouteState.ENDED):
            self._on_change(self, RouteChange.LEFT)
        self.choice.settle()

    def _become(self, state: RouteState) -> bool:
        """Take on a state that follows its own. Its engine stays its own in ADMITTED and RUNNING, and in no other.

        What was on its way when it left its engine makes no other state of it.

        Returns:
            Whether it goes on: False if its way was over before.
        """
        if self.state in _OVER:
            return False
        is_taken = state in _TAKEN
        if is_taken:
            self.is_admitted = True
            if self.engine is None:
                return True
        assert state in _NEXT[self.state], f"{self.state.name} is not followed by {state.name}"
        if self.state is RouteState.MOVING and self.engine is not None:
            self._on_change(self, RouteChange.ANSWERED)
        if not is_taken:
            self.engine = None
        self.state = state
        return True

    def _whole_account(self, finish: FinishedRequest) -> FinishedRequest:
        """Return the end with the times of all engines, as they were seen here, and the cached tokens of the first one.
        The last one has counted the guesses of all, unless one of them is of the version before."""
        assert self._first_token_ns is not None, "a token, or the end, has come"
        timings = replace(
            finish.timings,
            queued_ns=0,
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
