"""Finds the request that kills engines, so that it fails and those that were in flight beside it go on."""

from __future__ import annotations

from collections.abc import Sequence

from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.engines.session import EngineLoss
from triptych_services.frontend.streams.route import ChoiceRoute, Submission

SUSPECT_DEATHS = 2
"""A choice that was computed by so many engines which died in a row is a suspect."""
_NUM_GROUPS = 3
"""Parts that suspects are tested in, as an engine tests those that its workers may have died of."""


class DeathInquiry:
    """Owned by the migrator.

    Most engines die of their machines, and those of a rack together. So two deaths convict no request. They make it a
    suspect, and suspects are tested: no engine has more than a third of them at a time, and the others wait. Each
    engine that dies with some of them makes the parts smaller, down to one.

        2 deaths ──► suspects wait ──► a third at an engine ──► 32 tokens further: no suspects any more
                          ▲                   │ it dies
                          └── thirds of these ┘ of a single one: it fails
    """

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[EngineLoss, list[ChoiceRoute]]] = {}
        """Identity of each death that is to be reviewed -> the death, and the choices that the engine computed."""
        self._under_test: set[ChoiceRoute] = set()
        """Suspects that an engine has."""
        self._at_engine: dict[EngineClient, set[Submission]] = {}
        """Suspects that each engine has, as counted in this turn."""
        self._limits: dict[EngineClient, int] = {}
        """The smallest part that a suspect at each engine is tested in, as of this turn."""

    def note_lost(self, route: ChoiceRoute, loss: EngineLoss) -> None:
        """Take in that an engine has died which computed a choice."""
        self._under_test.discard(route)
        self._deaths.setdefault(id(loss), (loss, []))[1].append(route)

    def review(self) -> list[ChoiceRoute]:
        """Look at the deaths since the last call, and return the choices that are convicted."""
        deaths, self._deaths = self._deaths, {}
        convicted = []
        for _, routes in deaths.values():
            suspects = [route for route in routes if route.num_deaths >= SUSPECT_DEATHS]
            # What was under test explains the death: others that were beside it are no suspects for that.
            suspects = [route for route in suspects if route.most_together] or suspects
            num_suspects = len({route.submission for route in suspects})
            if num_suspects == 1 and suspects[0].most_together == 1:
                convicted += suspects
                continue
            for route in suspects:
                route.most_together = -(-num_suspects // _NUM_GROUPS)
        return convicted

    def begin_turn(self) -> None:
        """Count the suspects that each engine has."""
        self._under_test = {route for route in self._under_test if _is_under_test(route)}
        self._at_engine, self._limits = {}, {}
        for route in self._under_test:
            assert route.engine is not None, "it is under test there"
            self._note(route, route.engine)

    def admissible(self, route: ChoiceRoute, engines: Sequence[EngineClient]) -> Sequence[EngineClient]:
        """Return those of some engines that a choice may go to."""
        most = route.most_together
        if not most:
            return engines

        def has_room(engine: EngineClient) -> bool:
            there = self._at_engine.get(engine, ())
            return route.submission in there or len(there) < min(most, self._limits.get(engine, most))

        return list(filter(has_room, engines))

    def note_chosen(self, route: ChoiceRoute, engine: EngineClient) -> None:
        """Take in that a choice goes to an engine."""
        if route.most_together:
            self._under_test.add(route)
            self._note(route, engine)

    def _note(self, route: ChoiceRoute, engine: EngineClient) -> None:
        self._at_engine.setdefault(engine, set()).add(route.submission)
        self._limits[engine] = min(route.most_together, self._limits.get(engine, route.most_together))


def _is_under_test(route: ChoiceRoute) -> bool:
    is_alive = route.engine is not None and route.choice.finish_reason is None
    return is_alive and route.most_together > 0
