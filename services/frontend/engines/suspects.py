"""Finds the request that kills engines, so that it fails and those that were in flight beside it go on."""

from __future__ import annotations

from collections.abc import Sequence

from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.journey import Journey, Submission
from triptych_services.frontend.engines.session import EngineLoss

SUSPECT_DEATHS = 2
"""A choice that was computed by so many engines which died in a row is a suspect."""
_NUM_GROUPS = 3
"""Parts that suspects are tested in, as an engine tests those that its workers may have died of."""


class DeathInquiry:
    """Owned by the mover.

    Most engines die of their machines, and those of a rack together. So two deaths convict no request. They make it a
    suspect, and suspects are tested: no engine has more than a third of them at a time, and the others wait. Each
    engine that dies with some of them makes the parts smaller, down to one.

        2 deaths ──► suspects wait ──► a third at an engine ──► 32 tokens further: no suspects any more
                          ▲                   │ it dies
                          └── thirds of these ┘ of a single one: it fails
    """

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[EngineLoss, list[Journey]]] = {}
        """Identity of each death that is to be reviewed -> the death, and the choices that the engine computed."""
        self._under_test: set[Journey] = set()
        """Suspects that an engine has."""
        self._at_engine: dict[EngineClient, set[Submission]] = {}
        """Suspects that each engine has, as counted in this turn."""
        self._limits: dict[EngineClient, int] = {}
        """The smallest part that a suspect at each engine is tested in, as of this turn."""

    def note_lost(self, journey: Journey, loss: EngineLoss) -> None:
        """Take in that an engine has died which computed a choice."""
        self._under_test.discard(journey)
        self._deaths.setdefault(id(loss), (loss, []))[1].append(journey)

    def review(self) -> list[Journey]:
        """Look at the deaths since the last call, and return the choices that are convicted."""
        deaths, self._deaths = self._deaths, {}
        convicted = []
        for _, journeys in deaths.values():
            suspects = [journey for journey in journeys if journey.num_deaths >= SUSPECT_DEATHS]
            # What was under test explains the death: others that were beside it are no suspects for that.
            suspects = [journey for journey in suspects if journey.most_together] or suspects
            num_suspects = len({journey.submission for journey in suspects})
            if num_suspects == 1 and suspects[0].most_together == 1:
                convicted += suspects
                continue
            for journey in suspects:
                journey.most_together = -(-num_suspects // _NUM_GROUPS)
        return convicted

    def begin_turn(self) -> None:
        """Count the suspects that each engine has."""
        self._under_test = {journey for journey in self._under_test if _is_under_test(journey)}
        self._at_engine, self._limits = {}, {}
        for journey in self._under_test:
            assert journey.engine is not None, "it is under test there"
            self._note(journey, journey.engine)

    def admissible(self, journey: Journey, engines: Sequence[EngineClient]) -> Sequence[EngineClient]:
        """Return those of some engines that a choice may go to."""
        most = journey.most_together
        if not most:
            return engines

        def has_room(engine: EngineClient) -> bool:
            there = self._at_engine.get(engine, ())
            return journey.submission in there or len(there) < min(most, self._limits.get(engine, most))

        return list(filter(has_room, engines))

    def note_chosen(self, journey: Journey, engine: EngineClient) -> None:
        """Take in that a choice goes to an engine."""
        if journey.most_together:
            self._under_test.add(journey)
            self._note(journey, engine)

    def _note(self, journey: Journey, engine: EngineClient) -> None:
        self._at_engine.setdefault(engine, set()).add(journey.submission)
        self._limits[engine] = min(journey.most_together, self._limits.get(engine, journey.most_together))


def _is_under_test(journey: Journey) -> bool:
    is_alive = journey.engine is not None and journey.choice.finish_reason is None
    return is_alive and journey.most_together > 0
