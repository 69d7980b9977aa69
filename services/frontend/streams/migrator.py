"""Moves choices whose engine is gone, or gives them up, to other engines."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass

from triptych.config import FrontendConfig
from triptych.errors import EngineFailure, EngineUnavailable, QueueFull, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import FrontendMetrics
from triptych.types.facts import ModelFacts
from triptych.types.identity import Likeness, compare
from triptych.types.submit import RequestNeeds
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.heartbeat import HEARTBEAT_S
from triptych_services.frontend.engines.session import EngineLoss
from triptych_services.frontend.engines.suspects import SUSPECT_DEATHS, DeathInquiry
from triptych_services.frontend.routing.kinds import KindKey, facts_of, key_of, welcome_of, why_unfit
from triptych_services.frontend.routing.router import Router
from triptych_services.frontend.streams.route import ChoiceRoute, RouteChange, Submission

log = logging.getLogger(__name__)

MAX_LOSSES = 5
"""A choice that has lost so many engines in a row is not moved again, unless it is a suspect, which is tested."""
CHOICES_PER_TURN = 64
MAX_UNANSWERED = 128
"""Choices moved to one engine that it has not answered yet."""
_FIRST_PAUSE_S = 0.02  # at most: the frontends of an engine that died do not come to the next one all at once
_NUM_WITNESSES = 16  # engines of a kind, at least, that are asked for signs of life beside silent ones
_PATIENCE = 5  # times as long may engines be silent if most are: rather the network or this machine is slow
_NO_NEEDS = RequestNeeds()
_PAUSE_S = 0.005  # at most, between two turns
_TICK_S = 0.05  # between two looks while a choice waits, or an engine is lost that has no peer
_CHANGE_S = 0.025  # after a change of an engine, so that many of them cost one look
_STALL_S = 0.2  # this process was late itself by more: no engine's silence counts
_FRESH_S = 1.5 * HEARTBEAT_S  # an engine that was asked for signs of life has given one within this time
_REFUSED_S = 0.2  # before engines are asked again that have all refused


@dataclass(frozen=True, slots=True)
class MigrationTerms:
    """When choices move, and where to."""

    policy: str = "same_numerics"
    """As `frontend.moves`."""
    after_s: float = 0.25
    after_silence_s: float = 1.0
    timeout_s: float = 30.0
    """This and the two before: as `frontend.move_…` in seconds."""

    @classmethod
    def of(cls, config: FrontendConfig) -> MigrationTerms:
        """Return the terms that an operator has set."""
        return cls(config.moves, config.move_after_s, config.move_after_silence_s, config.move_timeout_s)


class Migrator:
    """The choices of this frontend that wait for an engine to go on with. Owned by the app, which runs `run`.

    It watches the engines, too: it gives up the session with one that is lost or silent while another could go on.
    """

    def __init__(
        self,
        router: Router,
        metrics: FrontendMetrics,
        terms: MigrationTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._terms = terms
        self._clock = clock
        self._waiting: dict[ChoiceRoute, None] = {}
        """In the order in which they lost their engines."""
        self._inquiry = DeathInquiry()
        self._unanswered: Counter[EngineClient] = Counter()
        """Engine -> choices moved to it that it has not answered."""
        self._news = asyncio.Event()
        self._is_watching = False
        """Whether something is in flight or waits, so that changes of engines matter."""
        self._is_change_noted = False
        router.subscribe(self._on_engines_changed)

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for an engine."""
        return len(self._waiting)

    def on_change(self, route: ChoiceRoute, change: RouteChange) -> None:
        """Take a change of a choice that computes, or waits, here."""
        match change:
            case RouteChange.BEGUN:
                if not self._is_watching and self._terms.policy != "never":
                    self._news.set()
            case RouteChange.LEFT:
                self._waiting.pop(route, None)
            case RouteChange.ANSWERED:
                assert route.engine is not None, "it was moved to one"
                self._unanswered[route.engine] -= 1
                if self._waiting:
                    self._news.set()
            case RouteChange.REFUSED:
                self._waiting[route] = None
                self._news.set()
            case RouteChange.DIED:
                self._inquiry.note_lost(route, route.loss)
                self._news.set()
            case RouteChange.LOST:
                self._take_lost(route)
            case RouteChange.RELEASED:
                self._take_released(route)

    def _on_engines_changed(self) -> None:
        """Look at the engines in a moment: one of them is there, or gone."""
        if self._is_watching and not self._is_change_noted:
            self._is_change_noted = True
            asyncio.get_running_loop().call_later(_CHANGE_S, self._news.set)

    def _take_lost(self, route: ChoiceRoute) -> None:
        """Queue a choice whose engine is gone, or end it."""
        if self._terms.policy == "never":
            route.choice.on_end(route.loss)
            return
        route.num_losses += 1
        if route.num_losses >= MAX_LOSSES and route.num_deaths < SUSPECT_DEATHS:
            self._fail(route, f"{route.loss.why}, the last of {route.num_losses} in a row")
        else:
            self._wait(route)

    def _take_released(self, route: ChoiceRoute) -> None:
        """Move a choice away from its engine, which cannot end it in time, if there is another."""
        engine = route.engine
        if engine is None or self._terms.policy == "never":
            return
        route.refused_by.add(engine)
        if self._choose(route) is None:
            route.refused_by.discard(engine)
            return
        route.loss = EngineLoss(f"engine {engine.name} has given the request up")
        route.leave_engine()
        self._wait(route)

    async def run(self) -> None:
        """Watch the engines, and move what waits, until cancelled."""
        watched_at = self._clock()
        while True:
            rest_s = self._rest_s(self._clock())
            self._is_watching = rest_s is not None
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._news.wait()
            self._news.clear()
            self._is_change_noted = False
            now = self._clock()
            self._watch_engines(now, is_late=rest_s is not None and now - watched_at > rest_s + _STALL_S)
            watched_at = now
            for route in self._inquiry.review():
                self._convict(route)
            if self._waiting:
                self._give_up_late(now)
                await self._move()
            self._show_waiting(now)

    def _rest_s(self, now: float) -> float | None:
        """Return the seconds after which a look is due without news; None: nothing waits, and nothing is in flight.

        Looks are so frequent that a stall of this process between two of them is no silence of an engine.
        """
        if self._waiting:
            return _TICK_S
        if self._terms.policy == "never":
            return None
        after_s, after_silence_s = self._terms.after_s, self._terms.after_silence_s
        due = [
            engine.due_at(after_s=after_s, after_silence_s=after_silence_s)
            for engine in self._router.engines
            if engine.num_in_flight
        ]
        if not due:
            return None
        return max(min(min(due) - now, after_silence_s / 4), _TICK_S)

    def _show_waiting(self, now: float) -> None:
        oldest_at = min((route.lost_at for route in self._waiting), default=now)
        self._metrics.waiting_for_engine.set(len(self._waiting))
        self._metrics.oldest_waiting_for_engine_seconds.set(now - oldest_at)

    def _watch_engines(self, now: float, *, is_late: bool) -> None:
        terms, engines = self._terms, self._router.engines
        if terms.policy == "never":
            return
        if is_late:
            for engine in engines:
                engine.liveness.pardon_silence(now)
            return
        if any(engine.silent_for(now) >= HEARTBEAT_S for engine in engines):
            self._ask_for_signs(now)
        living = [engine for engine in engines if now - engine.liveness.heard_at < _FRESH_S]
        silent = [engine for engine in engines if engine.silent_for(now) >= terms.after_silence_s]
        if len(silent) > len(living):
            silent = [e for e in silent if e.silent_for(now) >= _PATIENCE * terms.after_silence_s]
        # each that is given up changes the kinds of engines, so all are judged before
        given_up: dict[EngineClient, str] = {}
        for engine in engines:
            if engine.is_lost(now, after_s=terms.after_s) and self._has_peer(engine, engines, given_up):
                given_up[engine] = "others can go on with its requests"
        for engine in silent:
            if self._has_peer(engine, living, given_up):
                given_up[engine] = f"no sign of life for {engine.silent_for(now):.1f} s"
        for engine, why in given_up.items():
            engine.give_up(why)

    def _ask_for_signs(self, now: float) -> None:
        """Ask silent engines for a sign of life, and at least as many like them, which show that others could go on."""
        silent: dict[KindKey, list[EngineClient]] = {}
        others: dict[KindKey, list[EngineClient]] = {}
        for engine in self._router.engines:
            model = None if engine.welcome is None else engine.welcome.model
            if model is not None and engine.silent_for(now) >= HEARTBEAT_S:
                silent.setdefault(key_of(model), []).append(engine)
            elif model is not None and engine.is_ready:
                others.setdefault(key_of(model), []).append(engine)
        for key, engines in silent.items():
            like = others.get(key, [])
            witnesses = random.sample(like, min(len(like), max(_NUM_WITNESSES, len(engines))))
            for engine in (*engines, *witnesses):
                engine.send_heartbeat(now)

    def _has_peer(
        self, engine: EngineClient, among: Sequence[EngineClient], without: Container[EngineClient]
    ) -> bool:
        """Return whether another engine could go on with the requests of this one."""
        if engine.welcome is None or engine.welcome.model is None:
            return False
        facts = engine.welcome.model
        return any(
            peer is not engine
            and peer.is_ready
            and key_of(facts_of(peer)) == key_of(facts)
            and not why_unfit(welcome_of(peer), _NO_NEEDS)
            and peer not in without
            and not self._why_not_after(facts, peer)
            for peer in among
        )

    async def _move(self) -> None:
        """Submit what may be submitted now, in turns."""
        await asyncio.sleep(random.uniform(0, _FIRST_PAUSE_S))
        while groups := self._next_groups():
            for submission, routes, engine in groups:
                self._submit(submission, routes, engine)
            await asyncio.sleep(random.uniform(0, _PAUSE_S))

    def _next_groups(self) -> list[tuple[Submission, list[ChoiceRoute], EngineClient]]:
        """Return choices to submit now, with the engine for them. Those with output come first.

        The choices of one request that go to one engine are together.
        """
        now = self._clock()
        self._inquiry.begin_turn()
        ready = [route for route in self._waiting if route.not_before <= now]
        ready.sort(key=lambda route: not route.emitted)
        groups: dict[tuple[object, ...], list[ChoiceRoute]] = {}
        chosen: dict[tuple[object, ...], EngineClient] = {}
        num_chosen: Counter[EngineClient] = Counter()
        candidates: dict[tuple[object, ...], Sequence[EngineClient]] = {}
        for route in ready:
            if num_chosen.total() >= CHOICES_PER_TURN:
                break
            key = _group_key(route)
            if key not in groups:
                demand = self._demand_of(route)
                if demand not in candidates:
                    candidates[demand] = self._find_candidates(route, num_chosen)
                engines = self._inquiry.admissible(route, candidates[demand])
                engine = self._choose_among(engines, route)
                if engine is None:
                    self._note_no_engine(route)
                    continue
                groups[key], chosen[key] = [], engine
            groups[key].append(route)
            engine = chosen[key]
            self._inquiry.note_chosen(route, engine)
            num_chosen[engine] += 1
            if self._unanswered[engine] + num_chosen[engine] >= MAX_UNANSWERED:
                candidates.clear()  # it is full
        return [
            (group[0].submission, sorted(group, key=lambda route: route.choice.index), chosen[key])
            for key, group in groups.items()
        ]

    def _choose(self, route: ChoiceRoute) -> EngineClient | None:
        """Return the engine that a choice moves to; None if there is none now."""
        return self._choose_among(self._find_candidates(route, Counter()), route)

    def _choose_among(self, engines: Sequence[EngineClient], route: ChoiceRoute) -> EngineClient | None:
        if not engines:
            return None
        return self._router.choose_among(engines, route.submission.routed, route.needs.num_choices)

    def _demand_of(self, route: ChoiceRoute) -> tuple[object, ...]:
        """Return all that decides which engines a choice may go to now. Many choices have one in common."""
        wanted, needs = route.submission.wanted, route.needs
        return (
            key_of(wanted.model),
            wanted.adapter,
            route.facts.identity if route.emitted and route.facts is not None else None,
            bool(route.emitted),
            frozenset(route.refused_by),
            None if self._router.takes_everywhere(wanted, needs) else needs,
        )

    def _find_candidates(
        self, route: ChoiceRoute, num_chosen: Counter[EngineClient]
    ) -> Sequence[EngineClient]:
        """Return the engines that a choice may go to now, of those with output the most alike.

        Args:
            num_chosen: Choices that go to each engine in this turn.
        """
        excluded = self._excluded(route, num_chosen)
        engines = self._router.alike(route.submission.wanted, route.needs, excluded)
        if not route.emitted or len(engines) < 2:
            return engines
        likeness = {engine: route.likeness_of(facts_of(engine)) for engine in engines}
        best = max(likeness.values())
        return [engine for engine in engines if likeness[engine] is best]

    def _excluded(self, route: ChoiceRoute, num_chosen: Counter[EngineClient]) -> dict[EngineClient, str]:
        """Return the ready engines that a choice may not go to now, though they could serve it, and why."""
        now, excluded = self._clock(), {}
        for engine in self._router.engines:
            if not engine.is_ready:
                continue
            if engine in route.refused_by:
                excluded[engine] = "it has refused the request"
            elif self._unanswered[engine] + num_chosen[engine] >= MAX_UNANSWERED:
                excluded[engine] = f"{MAX_UNANSWERED} moved choices wait for its answer"
            elif (silent_s := engine.silent_for(now)) > _FRESH_S:
                excluded[engine] = f"it has been silent for {silent_s:.1f} s"
            elif route.emitted and (why := self._why_not_after(route.facts, engine)):
                excluded[engine] = why
        return excluded

    def _why_not_after(self, facts: ModelFacts | None, engine: EngineClient) -> str:
        """Return why the policy does not let a choice with output move to a ready engine; empty if it does.

        Args:
            facts: Of the engine that the output is from; None: not known.
        """
        if facts is None:
            return "it is not known what has computed the output so far"
        comparison = compare(facts.identity, facts_of(engine).identity)
        needed = Likeness.WEIGHTS if self._terms.policy == "any" else Likeness.NUMERICS
        return "" if comparison.likeness >= needed else comparison.difference

    def _submit(self, submission: Submission, routes: list[ChoiceRoute], engine: EngineClient) -> None:
        routes = [route for route in routes if route in self._waiting]
        if not routes:
            return  # they have ended in this turn, with another choice of their request
        has_output = routes[0].is_admitted and any(route.emitted for route in routes)
        moved_to = facts_of(engine) if has_output else None
        try:
            numbers = engine.submit(
                lambda numbers: submission.to_request(numbers, routes, moved_to), routes, submission.routed
            )
        except (EngineUnavailable, QueueFull):
            for route in routes:
                route.refused_by.add(engine)
            return
        except TriptychError as error:
            for route in routes:
                self._waiting.pop(route, None)
                route.choice.on_end(error)
            return
        for number, route in zip(numbers, routes, strict=True):
            self._waiting.pop(route, None)
            route.begin(engine, number)
            self._count(route, "exact" if route.is_exact else "inexact")
        self._unanswered[engine] += len(routes)
        fields = with_fields(
            request_id=submission.head.request_id,
            choices=len(routes),
            tokens=sum(len(route.emitted) for route in routes),
        )
        log.info("request moved to engine %s: %s", engine.name, routes[0].loss.why, extra=fields)

    def _wait(self, route: ChoiceRoute) -> None:
        now = self._clock()
        route.lost_at = route.not_before = now
        self._waiting[route] = None
        self._news.set()

    def _put_off(self, route: ChoiceRoute) -> None:
        """Let a choice wait until engines may be asked again that have refused it."""
        route.refused_by.clear()
        route.not_before = self._clock() + _REFUSED_S * random.uniform(0.5, 1.5)

    def _note_no_engine(self, route: ChoiceRoute) -> None:
        """Let a choice wait for an engine, if its client was told that it runs; else it may ask elsewhere."""
        if not route.is_admitted:
            if not self._router.alike(route.submission.wanted, route.needs, route.refused_by):
                self._fail(route, route.loss.why)
        elif route.refused_by:
            self._put_off(route)
        else:
            route.not_before = self._clock() + _TICK_S

    def _give_up_late(self, now: float) -> None:
        """Fail the choices that have waited for too long."""
        timeout_s = self._terms.timeout_s
        for route in [j for j in self._waiting if now - j.lost_at >= timeout_s]:
            reasons = self._excluded(route, Counter())
            why = self._router.why_none(route.submission.wanted, route.needs, reasons)
            self._fail(route, f"{route.loss.why}; no engine could go on within {timeout_s:g} s ({why})")

    def _convict(self, route: ChoiceRoute) -> None:
        """End a choice that engines die of."""
        if route not in self._waiting:
            return  # it has ended
        self._waiting.pop(route, None)
        self._count(route, "suspected")
        route.choice.on_end(
            EngineFailure(
                f"{route.loss.why}; it is engine number {route.num_deaths} in a row to die while this request was "
                "computed, the last time with no other suspect beside it: it is not moved again"
            )
        )

    def _fail(self, route: ChoiceRoute, why: str) -> None:
        self._waiting.pop(route, None)
        self._count(route, "failed")
        route.choice.on_end(EngineLoss(why))

    def _count(self, route: ChoiceRoute, outcome: str) -> None:
        model = route.submission.wanted.model
        self._metrics.moves.labels("" if model is None else model.name, outcome).inc()


def _group_key(route: ChoiceRoute) -> tuple[object, ...]:
    """Return what the choices have in common that are submitted together."""
    facts, refused_by = route.facts, frozenset(route.refused_by)
    if not route.is_admitted:  # all choices of a new request are admitted together
        return id(route.submission), facts, refused_by
    return (
        id(route.submission),
        facts,
        refused_by,
        route.num_deaths,
        route.awaits_prompt,
        bool(route.emitted),
    )
