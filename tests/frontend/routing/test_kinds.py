"""Engines that can serve each other's requests: what must be alike, and what a request must fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_engine import MODEL
from triptych.errors import EngineUnavailable, InvalidRequest
from triptych.prefix_hash import describe_hash
from triptych.types.facts import ModelFacts
from triptych.types.submit import EngineLimits, EngineWelcome, RequestNeeds
from triptych_services.frontend.routing import router as router_module
from triptych_services.frontend.routing.load import EngineLoad
from triptych_services.frontend.routing.policy import RoundRobin
from triptych_services.frontend.routing.router import Router

LIMITS = EngineLimits(has_priorities=True, max_choices=10)


@dataclass(eq=False)
class Engine:
    """An engine as far as the router sees it."""

    name: str
    model: ModelFacts = MODEL
    limits: EngineLimits = LIMITS
    is_ready: bool = True
    why_not_ready: str = "it is loading"
    is_connected: bool = True
    address: str = "host:1"
    num_in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)

    def say_takes_streams(self, takes_streams: bool) -> None:
        """See `EngineClient`."""

    @property
    def welcome(self) -> EngineWelcome:
        return EngineWelcome(self.name, self.is_ready, model=self.model, limits=self.limits)


class ComparedEngine(Engine):
    """An engine that counts how often it is compared with another."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        ComparedEngine.num_compared += 1
        return self is other

    __hash__ = object.__hash__


def test_a_change_of_one_engine_searches_for_none() -> None:
    """A search for each engine among all took 114 ms with a thousand, at each change."""
    router = routing(*(ComparedEngine(f"engine-{number}") for number in range(50)))
    assert len(router.alike(router.find("tiny"))) == 50
    assert ComparedEngine.num_compared == 0


def routing(*engines: Engine) -> Router:
    router = Router(policy=RoundRobin())
    router.engines = engines  # type: ignore[assignment]
    return router


def with_model(name: str, **fields: Any) -> Engine:
    return Engine(name, replace(MODEL, **fields))


def with_limits(name: str, **fields: Any) -> Engine:
    return Engine(name, limits=replace(LIMITS, **fields))


def names(engines: Iterable[Any]) -> set[str]:
    return {engine.name for engine in engines}


def of_identity(name: str, **fields: Any) -> Engine:
    return with_model(name, identity=replace(MODEL.identity, **fields))


@pytest.mark.parametrize(
    "other",
    [
        with_model("b", max_model_len=62),
        with_limits("b", max_choices=11),
        with_limits("b", has_priorities=False),
        of_identity("b", weights="2" * 64),
        of_identity("b", numerics="other", is_batch_invariant=False),
    ],
)
def test_requests_that_fit_both_go_to_both(other: Engine) -> None:
    """Free memory differs by megabytes, and a roll-out changes one option at a time."""
    router = routing(Engine("a"), other)
    wanted = router.find("tiny")
    assert names(router.choose(wanted, RequestNeeds(60, 10)) for _ in range(4)) == {"a", "b"}


@pytest.mark.parametrize(
    ("other", "needs", "why"),
    [
        (
            with_model("b", max_model_len=62),
            RequestNeeds(63),
            "b: max_model_len: 62 is below the 63 tokens that the request may have",
        ),
        (
            with_limits("b", max_choices=3),
            RequestNeeds(9, 4),
            "b: max_choices: 3 is below the 4 choices of the request",
        ),
        (
            with_limits("b", has_priorities=False),
            RequestNeeds(9, 1, has_priority=True),
            "b: scheduler.policy: it has no priorities, and the request has one",
        ),
        (of_identity("b", fingerprint="5" * 64), RequestNeeds(9), "b: fingerprint: 555"),
        (with_model("b", vocab_size=301), RequestNeeds(9), "b: vocab_size: 301, not 300"),
        (with_model("b", eos_token_ids=(1, 2)), RequestNeeds(9), r"b: eos_token_ids: \(1, 2\), not \(299,\)"),
        (Engine("b", replace(MODEL, name="small")), RequestNeeds(9), "b: model: small, not tiny"),
        (Engine("b", is_ready=False), RequestNeeds(9), "b: it is loading"),
    ],
)
def test_the_fact_that_differs_is_named(other: Engine, needs: RequestNeeds, why: str) -> None:
    first = Engine("a")
    router = routing(first, other)
    wanted = router.find("tiny")
    wanted = replace(wanted, model=replace(MODEL, max_model_len=wanted.model.max_model_len))
    assert router.choose(wanted, needs) is first
    with pytest.raises(EngineUnavailable, match=why):
        router.choose(wanted, needs, tried=[first])  # type: ignore[list-item]


def test_requests_are_checked_against_the_widest_limits() -> None:
    router = routing(
        with_model("a", max_model_len=60), Engine("b"), with_limits("c", max_choices=12, has_priorities=False)
    )
    terms = router.find("tiny")
    assert terms.model.max_model_len == 64
    assert terms.limits == EngineLimits(has_priorities=True, max_choices=12)
    assert router.max_choices("tiny") == 32


def test_a_request_without_max_tokens_fits_engines_of_about_one_length() -> None:
    """It may fill what the shorter of them have, so that it can move; far shorter ones do not count."""
    router = routing(Engine("a"), with_model("b", max_model_len=60), with_model("short", max_model_len=20))
    terms = router.find("tiny")
    assert terms.default_len == 60
    assert terms.context_for(10) == 60
    assert terms.context_for(59) == 64, "almost nothing would be left"
    assert names(router.alike(terms, RequestNeeds(terms.context_for(10)))) == {"a", "b"}


def test_engines_that_share_a_name_are_told_apart_by_address() -> None:
    """Two that were started without a name on one host, say."""
    first, second = Engine("host", address="host:1"), Engine("host", address="host:2")
    router = routing(first, second, Engine("other", address="other:1"))
    assert router.namesakes() == {"host": ["host:1", "host:2"]}
    assert router.by_id("host:2") is second
    with pytest.raises(
        InvalidRequest, match="'host' is the name of several engines; give one of host:1, host:2"
    ):
        router.by_id("host")
    second.is_connected = False
    assert router.namesakes() == {}, "it was started again elsewhere, maybe under this name"


def test_engines_are_grouped_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request walks over a list; it does not compare the facts of a thousand engines."""
    num_grouped = 0
    group = router_module.group_by_kind

    def counting(engines: Any) -> Any:
        nonlocal num_grouped
        num_grouped += 1
        return group(engines)

    monkeypatch.setattr(router_module, "group_by_kind", counting)
    engines = [Engine(str(number)) for number in range(50)]
    router = routing(*engines)
    for _ in range(20):
        wanted = router.find("tiny")
        router.check_free_places("small", 0, "")
        router.read_prompt(wanted, np.arange(5, dtype=np.uint32), "")
        router.choose(wanted, RequestNeeds(30))
    assert num_grouped == 1
    engines[0].is_ready = False
    router.on_change()
    assert "0" not in names(router.alike(router.find("tiny")))
    assert num_grouped == 2


def test_a_long_prompt_is_hashed_before_the_choice() -> None:
    """It is read on a thread; the choice runs on the event loop."""
    engines = [Engine(str(number)) for number in range(2)]
    for engine in engines:
        engine.load.note_hash(describe_hash(16))
    router = Router()
    router.engines = engines  # type: ignore[assignment]
    wanted = router.find("tiny")
    for num_tokens, is_hashed in ((2048, False), (2049, True)):
        prompt = router.read_prompt(wanted, np.arange(num_tokens, dtype=np.uint32), "")
        assert prompt is not None
        assert prompt.is_hashed(16) == is_hashed
