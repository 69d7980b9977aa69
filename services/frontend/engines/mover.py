"""Moves choices whose engine is gone, or gives them up, to other engines."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from triptych.config import FrontendConfig
from triptych.errors import EngineFailure, EngineUnavailable, QueueFull, TriptychError
from triptych.observe.logging import with_fields
from triptych.observe.metrics import FrontendMetrics
from triptych.types.facts import ModelFacts
from triptych.types.identity import Likeness, compare
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.journey import Journey, Submission
from triptych_services.frontend.engines.kinds import facts_of, key_of, terms_of
from triptych_services.frontend.engines.liveness import BEAT_S
from triptych_services.frontend.engines.router import Router
from triptych_services.frontend.engines.session import EngineLoss
from triptych_services.frontend.engines.suspects import SUSPECT_DEATHS, DeathInquiry

log = logging.getLogger(__name__)

MAX_LOSSES = 5
"""A choice that has lost so many engines in a row is not moved again, unless it is a suspect, which is tested."""
CHOICES_PER_TURN = 64
MAX_UNANSWERED = 128
"""Choices moved to one engine that it has not answered yet."""
_FIRST_PAUSE_S = 0.02  # at most: the frontends of an engine that died do not come to the next one all at once
_PAUSE_S = 0.005  # at most, between two turns
_TICK_S = 0.05  # between two looks while a choice waits, or an engine is lost that has no peer
_CHANGE_S = 0.025  # after a change of an engine, so that many of them cost one look
_STALL_S = 0.2  # this process was late itself by more: no engine's silence counts
_FRESH_S = 1.5 * BEAT_S  # an engine that was asked for signs of life has given one within this time
_REFUSED_S = 0.2  # before engines are asked again that have all refused


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """When choices move, and where to."""

    policy: str = "same_numerics"
    """As `frontend.moves`."""
    after_s: float = 0.25
    after_silence_s: float = 1.0
    timeout_s: float = 30.0
    """This and the two before: as `frontend.move_…` in seconds."""

    @classmethod
    def of(cls, config: FrontendConfig) -> MoveTerms:
        """Return the terms that an operator has set."""
        return cls(config.moves, config.move_after_s, config.move_after_silence_s, config.move_timeout_s)


class Mover:
    """The choices of this frontend that wait for an engine to go on with. Owned by the app, which runs `run`.

    It watches the engines, too: it gives up the session with one that is lost or silent while another could go on.
    """

    def __init__(
        self,
        router: Router,
        metrics: FrontendMetrics,
        terms: MoveTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._terms = terms
        self._clock = clock
        self._waiting: dict[Journey, None] = {}
        """In the order in which they lost their engines."""
        self._inquiry = DeathInquiry()
        self._unanswered: Counter[EngineClient] = Counter()
        """Engine -> choices moved to it that it has not answered."""
        self._news = asyncio.Event()
        self._is_watching = False
        """Whether something is in flight or waits, so that changes of engines matter."""
        self._is_change_noted = False
        router.subscribe(self._on_change)

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for an engine."""
        return len(self._waiting)

    def on_begun(self) -> None:
        """Begin to watch the engines, if nothing was in flight."""
        if not self._is_watching and self._terms.policy != "never":
            self._news.set()

    def _on_change(self) -> None:
        """Look at the engines in a moment: one of them is there, or gone."""
        if self._is_watching and not self._is_change_noted:
            self._is_change_noted = True
            asyncio.get_running_loop().call_later(_CHANGE_S, self._news.set)

    def on_death(self, journey: Journey, loss: EngineLoss) -> None:
        """Note that an engine has died while a choice, which may be the reason, was computed there."""
        self._inquiry.note_lost(journey, loss)
        self._news.set()

    def on_lost(self, journey: Journey, loss: EngineLoss) -> None:
        """Take a choice whose engine is gone."""
        if self._terms.policy == "never":
            journey.choice.on_engine_lost(loss.why)
            return
        journey.note_lost(loss)
        if journey.num_losses >= MAX_LOSSES and journey.num_deaths < SUSPECT_DEATHS:
            self._fail(journey, f"{loss.why}, the last of {journey.num_losses} in a row")
        else:
            self._wait(journey)

    def on_offered(self, journey: Journey) -> None:
        """Move a choice away from its engine, which cannot end it in time, if there is another."""
        engine = journey.engine
        if engine is None or self._terms.policy == "never":
            return
        journey.refused_by.add(engine)
        if self._choose(journey) is None:
            journey.refused_by.discard(engine)
            return
        journey.loss = EngineLoss(f"engine {engine.name} has given the request up")
        journey.leave_engine()
        self._wait(journey)

    def on_answered(self, journey: Journey) -> None:
        """Note that the engine has answered the submission of a choice that was moved to it."""
        assert journey.engine is not None, "it was moved to one"
        self._unanswered[journey.engine] -= 1
        if self._waiting:
            self._news.set()

    def on_refused(self, journey: Journey, error: Exception) -> None:
        """Take a choice back that the engine refuses to which it was moved."""
        if isinstance(error, QueueFull | EngineUnavailable):
            self._waiting[journey] = None
            self._news.set()
        else:
            journey.choice.on_error(error)

    def forget(self, journey: Journey) -> None:
        """Note that a choice is not waited for any more."""
        self._waiting.pop(journey, None)

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
            for journey in self._inquiry.review():
                self._convict(journey)
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
        oldest_at = min((journey.lost_at for journey in self._waiting), default=now)
        self._metrics.waiting_for_engine.set(len(self._waiting))
        self._metrics.oldest_waiting_for_engine_seconds.set(now - oldest_at)

    def _watch_engines(self, now: float, *, is_late: bool) -> None:
        terms, engines = self._terms, self._router.engines
        if terms.policy == "never":
            return
        if is_late:
            for engine in engines:
                engine.life.pardon_silence(now)
            return
        if any(engine.silent_for(now) >= BEAT_S for engine in engines):
            for engine in engines:
                engine.beat(now)
        for engine in engines:
            if engine.is_lost(now, after_s=terms.after_s) and self._has_peer(engine):
                engine.give_up("others can go on with its requests")
            elif engine.silent_for(now) >= terms.after_silence_s:
                living = [e for e in engines if now - e.life.heard_at < _FRESH_S]
                if self._has_peer(engine, among=living):
                    engine.give_up(f"no sign of life for {engine.silent_for(now):.1f} s")

    def _has_peer(self, engine: EngineClient, among: Collection[EngineClient] | None = None) -> bool:
        """Return whether another engine could go on with the requests of this one."""
        if engine.welcome is None or engine.welcome.model is None:
            return False
        peers = self._router.alike(terms_of(engine.welcome), tried=(engine,))
        return any(
            (among is None or peer in among) and not self._why_not_after(engine.welcome.model, peer)
            for peer in peers
        )

    async def _move(self) -> None:
        """Submit what may be submitted now, in turns."""
        await asyncio.sleep(random.uniform(0, _FIRST_PAUSE_S))
        while groups := self._next_groups():
            for submission, journeys, engine in groups:
                self._submit(submission, journeys, engine)
            await asyncio.sleep(random.uniform(0, _PAUSE_S))

    def _next_groups(self) -> list[tuple[Submission, list[Journey], EngineClient]]:
        """Return choices to submit now, with the engine for them. Those with output come first.

        The choices of one request that go to one engine are together.
        """
        now = self._clock()
        self._inquiry.begin_turn()
        ready = [journey for journey in self._waiting if journey.not_before <= now]
        ready.sort(key=lambda journey: not journey.emitted)
        groups: dict[tuple[object, ...], list[Journey]] = {}
        chosen: dict[tuple[object, ...], EngineClient] = {}
        num_chosen: Counter[EngineClient] = Counter()
        candidates: dict[tuple[object, ...], Sequence[EngineClient]] = {}
        for journey in ready:
            if num_chosen.total() >= CHOICES_PER_TURN:
                break
            key = _group_key(journey)
            if key not in groups:
                wish = self._wish_of(journey)
                if wish not in candidates:
                    candidates[wish] = self._find_candidates(journey, num_chosen)
                engines = self._inquiry.admissible(journey, candidates[wish])
                engine = self._choose_among(engines, journey)
                if engine is None:
                    self._note_no_engine(journey)
                    continue
                groups[key], chosen[key] = [], engine
            groups[key].append(journey)
            engine = chosen[key]
            self._inquiry.note_chosen(journey, engine)
            num_chosen[engine] += 1
            if self._unanswered[engine] + num_chosen[engine] >= MAX_UNANSWERED:
                candidates.clear()  # it is full
        return [
            (group[0].submission, sorted(group, key=lambda journey: journey.choice.index), chosen[key])
            for key, group in groups.items()
        ]

    def _choose(self, journey: Journey) -> EngineClient | None:
        """Return the engine that a choice moves to; None if there is none now."""
        return self._choose_among(self._find_candidates(journey, Counter()), journey)

    def _choose_among(self, engines: Sequence[EngineClient], journey: Journey) -> EngineClient | None:
        if not engines:
            return None
        return self._router.choose_among(engines, journey.submission.routed, journey.needs.num_choices)

    def _wish_of(self, journey: Journey) -> tuple[object, ...]:
        """Return all that decides which engines a choice may go to now. Many choices have one in common."""
        wanted, needs = journey.submission.wanted, journey.needs
        return (
            key_of(wanted.model),
            journey.facts.identity if journey.emitted and journey.facts is not None else None,
            bool(journey.emitted),
            frozenset(journey.refused_by),
            None if self._router.takes_everywhere(wanted, needs) else needs,
        )

    def _find_candidates(self, journey: Journey, num_chosen: Counter[EngineClient]) -> Sequence[EngineClient]:
        """Return the engines that a choice may go to now, of those with output the most alike.

        Args:
            num_chosen: Choices that go to each engine in this turn.
        """
        excluded = self._excluded(journey, num_chosen)
        engines = self._router.alike(journey.submission.wanted, journey.needs, excluded)
        if not journey.emitted or len(engines) < 2:
            return engines
        likeness = {engine: journey.likeness_of(facts_of(engine)) for engine in engines}
        best = max(likeness.values())
        return [engine for engine in engines if likeness[engine] is best]

    def _excluded(self, journey: Journey, num_chosen: Counter[EngineClient]) -> dict[EngineClient, str]:
        """Return the ready engines that a choice may not go to now, though they could serve it, and why."""
        now, excluded = self._clock(), {}
        for engine in self._router.engines:
            if not engine.is_ready:
                continue
            if engine in journey.refused_by:
                excluded[engine] = "it has refused the request"
            elif self._unanswered[engine] + num_chosen[engine] >= MAX_UNANSWERED:
                excluded[engine] = f"{MAX_UNANSWERED} moved choices wait for its answer"
            elif (silent_s := engine.silent_for(now)) > _FRESH_S:
                excluded[engine] = f"it has been silent for {silent_s:.1f} s"
            elif journey.emitted and (why := self._why_not_after(journey.facts, engine)):
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

    def _submit(self, submission: Submission, journeys: list[Journey], engine: EngineClient) -> None:
        try:
            numbers = engine.submit(
                lambda numbers: submission.to_request(numbers, journeys), journeys, submission.routed
            )
        except (EngineUnavailable, QueueFull):
            for journey in journeys:
                journey.refused_by.add(engine)
            return
        except TriptychError as error:
            for journey in journeys:
                self.forget(journey)
                journey.choice.on_error(error)
            return
        for number, journey in zip(numbers, journeys, strict=True):
            self.forget(journey)
            journey.begin(engine, number, is_moved=True)
            self._count(journey, "exact" if journey.choice.is_exact else "inexact")
        self._unanswered[engine] += len(journeys)
        fields = with_fields(
            request_id=submission.request_id,
            choices=len(journeys),
            tokens=sum(len(journey.emitted) for journey in journeys),
        )
        log.info("request moved to engine %s: %s", engine.name, journeys[0].loss.why, extra=fields)

    def _wait(self, journey: Journey) -> None:
        now = self._clock()
        journey.lost_at = journey.not_before = now
        self._waiting[journey] = None
        self._news.set()

    def _put_off(self, journey: Journey) -> None:
        """Let a choice wait until engines may be asked again that have refused it."""
        journey.refused_by.clear()
        journey.not_before = self._clock() + _REFUSED_S * random.uniform(0.5, 1.5)
        self._waiting[journey] = None

    def _note_no_engine(self, journey: Journey) -> None:
        """Let a choice wait for an engine, if its client was told that it runs; else it may ask elsewhere."""
        if not journey.is_admitted:
            if not self._router.alike(journey.submission.wanted, journey.needs, journey.refused_by):
                self._fail(journey, journey.loss.why)
        elif journey.refused_by:
            self._put_off(journey)
        else:
            journey.not_before = self._clock() + _TICK_S

    def _give_up_late(self, now: float) -> None:
        """Fail the choices that have waited for too long."""
        timeout_s = self._terms.timeout_s
        for journey in [j for j in self._waiting if now - j.lost_at >= timeout_s]:
            reasons = self._excluded(journey, Counter())
            why = self._router.why_none(journey.submission.wanted, journey.needs, reasons)
            self._fail(journey, f"{journey.loss.why}; no engine could go on within {timeout_s:g} s ({why})")

    def _convict(self, journey: Journey) -> None:
        """End a choice that engines die of."""
        if journey not in self._waiting:
            return  # it has ended
        self.forget(journey)
        self._count(journey, "suspected")
        journey.choice.on_error(
            EngineFailure(
                f"{journey.loss.why}; it is engine number {journey.num_deaths} in a row to die while this request was "
                "computed, the last time with no other suspect beside it: it is not moved again"
            )
        )

    def _fail(self, journey: Journey, why: str) -> None:
        self.forget(journey)
        self._count(journey, "failed")
        journey.choice.on_engine_lost(why)

    def _count(self, journey: Journey, outcome: str) -> None:
        model = journey.submission.wanted.model
        self._metrics.moves.labels("" if model is None else model.name, outcome).inc()


def _group_key(journey: Journey) -> tuple[object, ...]:
    """Return what the choices have in common that are submitted together."""
    facts, refused_by = journey.facts, frozenset(journey.refused_by)
    if not journey.is_admitted:  # all choices of a new request are admitted together
        return id(journey.submission), facts, refused_by
    return (
        id(journey.submission),
        facts,
        refused_by,
        journey.num_deaths,
        journey.awaits_prompt,
        bool(journey.emitted),
    )
