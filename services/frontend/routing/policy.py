"""Policies: which of several engines that could all serve a request gets it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

from triptych_services.frontend.routing.load import EngineLoad
from triptych_services.frontend.routing.outlooks import Outlooks, Rows, create_outlooks
from triptych_services.frontend.routing.prefix_index import RoutedPrompt

_LATELY_S = 5.0


class RoutableEngine(Protocol):
    """An engine as policies see it."""

    @property
    def num_in_flight(self) -> int:
        """Choices that were sent there from here and have not ended."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Its load and its cache, as far as they are known."""
        ...


class RoutingPolicy(Protocol):
    """Chooses among engines. Owned by the router."""

    looks_at_prompts: bool
    """Whether `choose` looks at the prompt."""

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        """Return the index of the engine that a request is sent to.

        Args:
            engines: All that could serve it; at least one.
            prompt: None: it is not known.
            num_choices: Choices of the request.
        """
        ...


class LeastLoaded:
    """The engine with the fewest choices from here in flight; of several, any."""

    looks_at_prompts = False

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        return min(range(len(engines)), key=lambda index: (engines[index].num_in_flight, random.random()))


class RoundRobin:
    """The engines in turn."""

    looks_at_prompts = False

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        return next(self._turns) % len(engines)


class Random:
    """Any engine."""

    looks_at_prompts = False

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        return random.randrange(len(engines))


class SoonestFirstToken:
    """The engine that is expected to give the first token soonest (docs/adr/0034).

    All that counts is in seconds: the prompts that wait there, the wait for a row, and the part of this prompt that is
    not cached there. So a prefix that many want spreads by itself, as soon as waiting for it costs more than computing
    it elsewhere. Of the engines that are expected to be as soon as the soonest, those remain that must compute no more
    than the others; of these two are drawn, and the emptier one wins.
    """

    looks_at_prompts = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic time in seconds."""
        self._least_loaded = LeastLoaded()
        self._prefixes = _RecentPrefixes(clock)
        self._known: tuple[Sequence[RoutableEngine], Outlooks] | None = None
        """The engines that were chosen among last, and their outlooks."""

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        outlooks = self._outlooks_of(engines)
        if not outlooks.refresh():
            return self._least_loaded.choose(engines, prompt, num_choices)
        cost, costs = self._count_tokens(engines, outlooks, prompt)
        soonest = outlooks.soonest(cost, costs, num_choices)
        drawn = random.sample(soonest, min(len(soonest), 2))
        return min(drawn, key=outlooks.num_choices)

    def _outlooks_of(self, engines: Sequence[RoutableEngine]) -> Outlooks:
        """Return the outlooks of these engines, kept while the router passes the same sequence: until one changes."""
        if self._known is None or self._known[0] is not engines:
            if self._known is not None:
                self._known[1].close()
            self._known = engines, create_outlooks([engine.load for engine in engines])
        return self._known[1]

    def _count_tokens(
        self, engines: Sequence[RoutableEngine], outlooks: Outlooks, prompt: RoutedPrompt | None
    ) -> tuple[float, list[tuple[float, Rows]]]:
        """Return the tokens that an engine would have to compute, and those of engines that cache some of them.

        What is cached at one engine and computed at another is a copy there, for the prompts to come as well: as many
        as have come with the same beginning lately. So its tokens are divided among its users.
        """
        if prompt is None:
            return 1.0, []
        found = outlooks.count_cached_tokens(prompt)
        if not found:
            return float(prompt.num_tokens), []
        most, holders = max(found, key=itemgetter(0))
        block_size = engines[holders[0]].load.block_size
        num_users = max(self._prefixes.count(prompt.keys(block_size)[-(-most // block_size) - 1]), 1)
        left = prompt.num_tokens - most
        costs = [(left + (most - cached) / num_users, rows) for cached, rows in found]
        return left + most / num_users, costs


class _RecentPrefixes:
    """Counts how often each beginning of prompts was asked for lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        """Key to how often: lately, and before that."""
        self._since = clock()

    def count(self, key: int) -> int:
        """Count a key, and return how often it had been counted before."""
        now = self._clock()
        if now - self._since > _LATELY_S:
            self._counts = ({}, self._counts[0] if now - self._since < 2 * _LATELY_S else {})
            self._since = now
        lately, before = self._counts
        num_lately = lately.get(key, 0)
        lately[key] = num_lately + 1
        return num_lately + before.get(key, 0)


def create_policy(name: str, clock: Callable[[], float] = time.monotonic) -> RoutingPolicy:
    """Return the policy that `frontend.routing` names. `clock`: monotonic time in seconds."""
    if name == "prefix":
        return SoonestFirstToken(clock)
    others: dict[str, type[RoutingPolicy]] = {
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
        "random": Random,
    }
    return others[name]()
