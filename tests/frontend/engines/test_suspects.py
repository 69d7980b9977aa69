"""Which request engines die of: it is found, and those that were in flight beside it go on."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_services.frontend.engines.session import EngineLoss
from triptych_services.frontend.engines.suspects import DeathInquiry


@dataclass(eq=False)
class Choice:
    """A choice as far as an inquiry is concerned."""

    submission: object = field(default_factory=object)
    num_deaths: int = 0
    most_together: int = 0
    engine: str | None = None
    choice: Any = field(default_factory=lambda: SimpleNamespace(finish_reason=None))


class Fleet:
    """Engines that die of a poisoned choice, if they compute it, and by chance."""

    def __init__(self, choices: list[Choice], num_engines: int, seed: int) -> None:
        self.inquiry = DeathInquiry()
        self.engines: list[Any] = [f"engine-{number}" for number in range(num_engines)]
        self.waiting: list[Any] = list(choices)
        self.convicted: list[Any] = []
        self.num_deaths = 0
        self._random = random.Random(seed)

    def place(self) -> None:
        """Let everything that waits go where it may."""
        self.inquiry.begin_turn()
        for choice in list(self.waiting):
            engines = self.inquiry.admissible(choice, self.engines)
            if engines:
                engine = self._random.choice(engines)
                self.inquiry.note_chosen(choice, engine)
                choice.engine = engine
                self.waiting.remove(choice)

    def die(self, engine: str, choices: list[Choice]) -> None:
        """End an engine with all that it computes."""
        self.num_deaths += 1
        loss = EngineLoss("it died", is_death=True)
        for choice in [c for c in choices if c.engine == engine]:
            choice.engine = None
            choice.num_deaths += 1
            self.inquiry.note_lost(choice, loss)  # type: ignore[arg-type]
            self.waiting.append(choice)
        for choice in self.inquiry.review():
            self.waiting.remove(choice)
            self.convicted.append(choice)

    def clear(self, choices: list[Choice]) -> None:
        """Let all that is computed come 32 tokens further."""
        for choice in choices:
            if choice.engine is not None:
                choice.num_deaths = choice.most_together = 0


@pytest.mark.parametrize("num_choices", [1, 2, 3, 15, 100, 1000])
@pytest.mark.parametrize("num_engines", [1, 2, 8])
def test_a_request_that_kills_engines_is_found(num_choices: int, num_engines: int) -> None:
    choices = [Choice() for _ in range(num_choices)]
    poison = choices[num_choices // 2]
    fleet = Fleet(choices, num_engines, seed=num_choices)
    for _ in range(100):
        fleet.place()
        if poison.engine is not None:
            fleet.die(poison.engine, choices)
        fleet.clear(choices)
        if fleet.convicted:
            break
    assert fleet.convicted == [poison]
    num_parts = math.ceil(math.log(max(num_choices, 2), 3))  # each a third of the one before
    assert fleet.num_deaths <= 2 + num_parts


@pytest.mark.parametrize("num_choices", [2, 3, 15, 100])
def test_engines_that_die_together_convict_nothing(num_choices: int) -> None:
    """All of them die twice in a row, with everything that they compute."""
    choices = [Choice() for _ in range(num_choices)]
    fleet = Fleet(choices, 2, seed=num_choices)
    for _ in range(2):
        fleet.place()
        for engine in fleet.engines:
            fleet.die(engine, choices)
    assert all(choice.num_deaths == 2 for choice in choices)
    for _ in range(100):
        fleet.place()
        fleet.clear(choices)
    assert not fleet.convicted
    assert not fleet.waiting


def test_the_choices_of_one_request_are_one_suspect() -> None:
    """They are submitted together, so that none of them is ever alone."""
    submission = object()
    choices = [Choice(submission) for _ in range(4)]
    fleet = Fleet(choices, 2, seed=0)
    for _ in range(3):
        fleet.place()
        for engine in fleet.engines:
            fleet.die(engine, choices)
    assert set(fleet.convicted) == set(choices)


def test_what_ends_makes_room_for_the_next() -> None:
    inquiry, engine = DeathInquiry(), "engine-0"
    first, second = (Choice(num_deaths=2, most_together=1) for _ in range(2))
    assert inquiry.admissible(first, [engine]) == [engine]  # type: ignore[arg-type, list-item]
    inquiry.note_chosen(first, engine)  # type: ignore[arg-type]
    first.engine = engine
    inquiry.begin_turn()
    assert inquiry.admissible(second, [engine]) == []  # type: ignore[arg-type, list-item]
    first.choice.finish_reason = "stop"
    inquiry.begin_turn()
    assert inquiry.admissible(second, [engine]) == [engine]  # type: ignore[arg-type, list-item]
