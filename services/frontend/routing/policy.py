"""Policies: which of several engines that could all serve a request gets it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych_services.frontend.routing.load import EngineLoad, WorkTimes
from triptych_services.frontend.routing.prefix_index import RoutedPrompt

_ALIKE_SHARE, _ALIKE_S = 0.05, 0.005  # by which expected times differ no more than they are known
_LATELY_S = 5.0
_UNMEASURED_TOKEN_S = 1e-4  # for each token of a prompt, where no engine has measured any yet


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

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        loads = [engine.load for engine in engines]
        if not all(load.is_known for load in loads):
            return self._least_loaded.choose(engines, prompt, num_choices)
        best = _best_times(loads)
        costs = [1.0] * len(engines) if prompt is None else self._count_tokens(loads, prompt)
        seconds = [
            load.first_token_s(cost, num_choices, best) for load, cost in zip(loads, costs, strict=True)
        ]
        limit_s = min(seconds) + max(_ALIKE_SHARE * min(seconds), _ALIKE_S)
        alike = [index for index in range(len(engines)) if seconds[index] <= limit_s]
        most_tokens = min(costs[index] for index in alike) + _ALIKE_S / best.prefill_token_s
        soonest = [index for index in alike if costs[index] <= most_tokens]
        drawn = random.sample(soonest, min(len(soonest), 2))
        return min(drawn, key=lambda index: loads[index].num_choices)

    def _count_tokens(self, loads: Sequence[EngineLoad], prompt: RoutedPrompt) -> list[float]:
        """Return the tokens that each engine would have to compute, those of a copy divided among its users.

        What is cached at one engine and computed at another is a copy there, for the prompts to come as well: as many
        as have come with the same beginning lately.
        """
        cached = [load.count_cached_tokens(prompt) for load in loads]
        most = max(cached)
        if not most:
            return [float(prompt.num_tokens)] * len(loads)
        block_size = loads[cached.index(most)].block_size
        num_users = self._prefixes.count(prompt.keys(block_size)[-(-most // block_size) - 1])
        return [prompt.num_tokens - most + (most - count) / max(num_users, 1) for count in cached]


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


def _best_times(loads: Sequence[EngineLoad]) -> WorkTimes:
    """Return the least that any engine has measured last."""
    reported = [load.reported for load in loads]
    return WorkTimes(
        min(filter(None, [load.prefill_token_s for load in reported]), default=_UNMEASURED_TOKEN_S),
        min(filter(None, [load.decode_step_s for load in reported]), default=0.0),
    )
