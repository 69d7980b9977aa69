"""Proposers are named by the operator; one of a package that misbehaves is switched off and harms no request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from tests.worker.runner.drafting.guessing import blocks_of, runner_with, say
from tests.worker.tiny import EchoModel, new_row, next_token, tiny_architecture, tiny_config
from triptych.config import SpeculativeConfig
from triptych.errors import FeatureDisabled
from triptych.types.facts import WorkerFacts
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting import create
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.create import GuardedProposer, proposers_of
from triptych_services.worker.sampling.params import TokenHistory

VOCAB = 97


class Package:
    """A package's proposer: guesses right, counts its calls, and does something else in some of them."""

    name = "package"

    def __init__(self, facts: WorkerFacts, history: TokenHistory) -> None:
        self.history = history
        self.num_calls = 0
        type(self).latest = self

    latest: Package

    def enter(self, row: NewRow) -> None:
        self.num_calls += 1

    def leave(self, slot: int) -> None:
        self.num_calls += 1

    def accept(self, slots: I64, counts: I64) -> None:
        self.num_calls += 1

    def propose(self, slots: I64, limits: I64) -> Guesses:
        self.num_calls += 1
        token_ids: list[int] = []
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            tokens = self.history.token_ids[slot, : self.history.num_known[slot]].tolist()
            for _ in range(limit):
                tokens.append(next_token(tokens, VOCAB))
            token_ids += tokens[-limit:]
        return self.changed(np.array(token_ids), limits)

    def changed(self, token_ids: I64, limits: I64) -> Any:
        return Guesses(token_ids, limits)


def raises(*arguments: object) -> None:
    raise RuntimeError("a bug")


def writes(self: Package, token_ids: I64, limits: I64) -> Guesses:
    self.history.token_ids[:] = 0
    return Guesses(token_ids, limits)


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "create": {"__init__": raises},
    "enter": {"enter": raises},
    "leave": {"leave": raises},
    "accept": {"accept": raises},
    "propose": {"propose": raises},
    "writes": {"changed": writes},
    "nothing": {"changed": lambda self, token_ids, limits: None},
    "outside": {"changed": lambda self, token_ids, limits: Guesses(token_ids + VOCAB, limits)},
    "negative": {"changed": lambda self, token_ids, limits: Guesses(token_ids - VOCAB, limits)},
    "more": {"changed": lambda self, token_ids, limits: Guesses(np.append(token_ids, 1), limits + 1)},
    "unequal": {"changed": lambda self, token_ids, limits: Guesses(token_ids[1:], limits)},
    "rows": {"changed": lambda self, token_ids, limits: Guesses(token_ids, np.append(limits, 0))},
    "shape": {"changed": lambda self, token_ids, limits: Guesses(token_ids[:, None], limits)},
    "fractions": {"changed": lambda self, token_ids, limits: Guesses(token_ids + 0.5, limits)},
    "slow": {"changed": lambda self, token_ids, limits: time.sleep(0.006) or Guesses(token_ids, limits)},
}


def install(monkeypatch: pytest.MonkeyPatch, package: type[Package] | None, name: str = "package") -> None:
    value = f"{__name__}:Installed" if package is not None else f"{__name__}:Missing"
    monkeypatch.setitem(globals(), "Installed", package)
    points = {create.ENTRY_POINT_GROUP: [EntryPoint(name, value, create.ENTRY_POINT_GROUP)]}
    monkeypatch.setattr(create, "entry_points", lambda group: points[group])


def rows_of(count: int) -> list[NewRow]:
    sampling = SamplingParams(temperature=0.0)
    return [
        new_row(slot, [5 + slot, 6, 7], blocks_of(slot), sampling=sampling, seed=slot)
        for slot in range(count)
    ]


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_package_guesses_until_it_misbehaves(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = type("Changed", (Package,), FAULTS.get(fault, {}))
    install(monkeypatch, package)
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    alone = say(runner_with(EchoModel(VOCAB), config, 1), rows_of(3), 30, 1)
    with caplog.at_level(logging.WARNING):
        runner = runner_with(
            EchoModel(VOCAB), config, 4, proposers_of(SpeculativeConfig(enabled="true", proposers="package"))
        )
        found = say(runner, rows_of(3), 30, 4)
        runner.reset()
    assert [each.token_ids for each in found] == [each.token_ids for each in alone]
    assert not any(each.error for each in found)
    told = [record.getMessage() for record in caplog.records if "switched off" in record.getMessage()]
    if fault == "none":
        assert told == []
        assert max(each.num_steps for each in found) < 12
        return
    assert len(told) == 1
    assert told[0].startswith("speculative.proposers: package of a package is switched off: ")
    if fault != "create":
        num_calls = package.latest.num_calls
        assert say(runner, rows_of(3), 5, 4)[0].num_steps == 5
        assert package.latest.num_calls == num_calls


def test_few_slow_calls_are_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60)
    runner = runner_with(EchoModel(VOCAB), config, 4)
    now = [0.0]

    def start_clock() -> Callable[[], float]:
        started = now[0]
        return lambda: now[0] - started

    class Slow(Package):
        def accept(self, slots: I64, counts: I64) -> None:
            now[0] += 0.006 if self.num_calls % 40 == 0 else 0.001
            super().accept(slots, counts)

    guarded = GuardedProposer("slow", Slow, runner.facts, runner._rows.history, start_clock=start_clock)
    slots = np.zeros(1, np.int64)
    for _ in range(400):
        guarded.accept(slots, slots + 1)
    assert Slow.latest.num_calls == 400


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_thread_that_was_stopped_is_not_slow(has_waited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 8 ms, in 2 of which the thread has computed."""
    wall, own, waits = iter([1.0, 1.008]), iter([0.5, 0.502]), iter([3, 3 + has_waited])
    monkeypatch.setattr(create.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(create.time, "thread_time", lambda: next(own))
    monkeypatch.setattr(create, "_num_waits", lambda: next(waits))
    assert create.start_own_clock()() == pytest.approx(0.008 if has_waited else 0.002)


def test_names_are_those_that_are_built_or_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Package)
    facts = runner_with(
        EchoModel(VOCAB), tiny_config(tiny_architecture(vocab_size=VOCAB), num_blocks=60), 4
    ).facts
    history = TokenHistory(np.zeros((4, 9), np.int32), np.zeros(4, np.int64), np.zeros(4, np.int64))

    def names(text: str, suffix_mib: int = 1) -> list[str]:
        config = SpeculativeConfig(enabled="true", proposers=text, suffix_mib=suffix_mib)
        return [each.name for each in proposers_of(config)(facts, history, None)]

    assert names("suffix, package,ngram,package") == ["suffix", "package", "ngram"]
    assert names(SpeculativeConfig().proposers) == ["ngram", "suffix"]  # without matchers there are no forms
    assert names(SpeculativeConfig().proposers, suffix_mib=0) == ["ngram"]
    with pytest.raises(
        FeatureDisabled, match=r"proposers = ngram,eagle.*only grammar, ngram, suffix, draft, mtp, package"
    ):
        names("ngram,eagle")
    with pytest.raises(FeatureDisabled, match="it names 0"):
        names(" ,")
    install(monkeypatch, None)
    with pytest.raises(FeatureDisabled, match=r"Missing.*cannot be imported.*leave package out"):
        names("package")
    assert proposers_of(SpeculativeConfig(proposers="eagle"))(facts, history, None) == []


def test_a_model_that_guesses_is_named_by_its_own_option() -> None:
    """It comes last, or where it is named; without a model its name means nothing."""
    facts: Any = None
    made: list[str] = []

    def create_draft(facts: WorkerFacts, history: TokenHistory) -> Any:
        made.append("draft")
        return Named("draft")

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        for name in ("grammar", "ngram", "suffix"):
            patched.setitem(create._OWN, name, lambda sources, name=name: Named(name))
        for named, expected in (
            ("grammar,ngram", ["grammar", "ngram", "draft"]),
            ("draft,ngram", ["draft", "ngram"]),
        ):
            config = SpeculativeConfig(enabled="true", proposers=named, model="small")
            proposers = proposers_of(config, {"draft": create_draft})(facts, facts, None)
            assert [each.name for each in proposers] == expected
        assert made == ["draft", "draft"]
        off = SpeculativeConfig(enabled="false", model="small")
        assert not proposers_of(off, {"draft": create_draft})(facts, facts, None)
    with pytest.raises(FeatureDisabled, match=r"draft needs a model; set speculative\.model"):
        proposers_of(SpeculativeConfig(enabled="true", proposers="ngram,draft"))
