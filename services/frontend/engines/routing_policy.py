"""Policies: which of several engines that could all serve a request gets it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Protocol

from services.frontend.engines.outlook import EngineOutlook
from services.frontend.engines.prefix_index import RoutedPrompt

_ALIKE_SHARE, _ALIKE_S = 0.05, 0.005  # by which expected times differ no more than they are known
_UNMEASURED_TOKEN_S = 1e-4  # for each token of a prompt, where no engine has measured any yet


class RoutableEngine(Protocol):
    """An engine as policies see it."""

    @property
    def num_in_flight(self) -> int:
        """Choices that were sent there from here and have not ended."""
        ...

    @property
    def outlook(self) -> EngineOutlook:
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

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()

    def choose(self, engines: Sequence[RoutableEngine], prompt: RoutedPrompt | None, num_choices: int) -> int:
        outlooks = [engine.outlook for engine in engines]
        if not all(outlook.is_known for outlook in outlooks):
            return self._least_loaded.choose(engines, prompt, num_choices)
        token_s = _mean_token_s(outlooks)
        # An engine cannot be sooner than with all of the prompt cached: those that wait longest need no look-up.
        floors = [
            (outlook.first_token_s(1, num_choices, token_s), index) for index, outlook in enumerate(outlooks)
        ]
        floors.sort()
        expected: list[tuple[float, int, int]] = []  # seconds, tokens to compute, index
        limit_s = float("inf")
        for floor_s, index in floors:
            if floor_s > limit_s:
                break
            num_tokens = 1
            if prompt is not None:
                num_tokens = prompt.num_tokens - outlooks[index].count_cached_tokens(prompt)
            seconds = outlooks[index].first_token_s(num_tokens, num_choices, token_s)
            expected.append((seconds, num_tokens, index))
            limit_s = min(limit_s, seconds + max(_ALIKE_SHARE * seconds, _ALIKE_S))
        alike = [entry for entry in expected if entry[0] <= limit_s]
        most_tokens = min(num_tokens for _, num_tokens, _ in alike) + _ALIKE_S / token_s
        soonest = [index for _, num_tokens, index in alike if num_tokens <= most_tokens]
        drawn = random.sample(soonest, min(len(soonest), 2))
        return min(drawn, key=lambda index: outlooks[index].num_choices)


def create_policy(name: str) -> RoutingPolicy:
    """Return the policy that `frontend.routing` names."""
    policies: dict[str, type[RoutingPolicy]] = {
        "prefix": SoonestFirstToken,
        "least_loaded": LeastLoaded,
        "round_robin": RoundRobin,
        "random": Random,
    }
    return policies[name]()


def _mean_token_s(outlooks: Sequence[EngineOutlook]) -> float:
    """Return the seconds of a prompt's token for engines that have not measured it."""
    measured = [outlook.load.prefill_token_s for outlook in outlooks if outlook.load.prefill_token_s]
    return sum(measured) / len(measured) if measured else _UNMEASURED_TOKEN_S
