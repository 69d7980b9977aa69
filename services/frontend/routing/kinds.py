"""Kinds of engines: those of a kind can serve each other's requests, as far as these fit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from triptych.errors import InvalidRequest, ModelNotFound
from triptych.types.adapters import AdapterFacts
from triptych.types.facts import ModelFacts
from triptych.types.kv_transfer import EngineRole
from triptych.types.submit import EngineWelcome, ModelTerms, RequestNeeds
from triptych_services.frontend.engines.client import EngineClient

_ABOUT_AS_LONG = 0.9
"""Share of the longest max_model_len from which on a request without max_tokens may be cut short for its engine."""

KindKey = tuple[str, str, int, tuple[int, ...]]
"""Model's name, fingerprint, size of the vocabulary and EOS tokens: all that a request without output depends on."""


class EngineKind:
    """The ready engines of one kind, as they were when it was made. Owned by the router, which makes it anew."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        """`engines`: At least one, all ready and of one kind."""
        self.engines = leave_out_prefilling(engines)
        """Those that prefill for others are among them only if there are no others."""
        is_mixed = len(self.engines) < len(engines)
        self.prefilling = [e for e in engines if is_mixed and welcome_of(e).role is EngineRole.PREFILL]
        """The others."""
        welcomes = [welcome_of(engine) for engine in self.engines]
        models = [welcome.model for welcome in welcomes if welcome.model is not None]
        longest = max(models, key=lambda model: model.max_model_len)
        tasks = dict.fromkeys(task for model in models for task in model.tasks)
        self._common_tasks = [task for task in tasks if all(task in model.tasks for model in models)]
        self._least = RequestNeeds(
            min(model.max_model_len for model in models),
            min(welcome.limits.max_choices for welcome in welcomes),
            all(welcome.limits.has_priorities for welcome in welcomes),
        )
        self.terms = ModelTerms(
            replace(longest, tasks=tuple(tasks)),
            replace(
                welcomes[0].limits,
                has_priorities=any(welcome.limits.has_priorities for welcome in welcomes),
                max_choices=max(welcome.limits.max_choices for welcome in welcomes),
            ),
            min(
                model.max_model_len
                for model in models
                if model.max_model_len >= _ABOUT_AS_LONG * longest.max_model_len
            ),
        )
        self.max_choices = sum(welcome.limits.max_choices for welcome in welcomes)
        """Choices that may be running and waiting on all of them together."""
        self.max_running = sum(welcome.limits.max_running for welcome in welcomes)
        """Choices that may be running on all of them together, of those that report it."""
        self.block_sizes = {engine.load.block_size for engine in self.engines}
        self.adapters = _common_adapters(welcomes)
        """Name -> the adapter that requests of this name get."""

    def takes_everywhere(self, needs: RequestNeeds) -> bool:
        """Return whether a request fits all engines."""
        least = self._least
        return (
            needs.num_tokens <= least.num_tokens
            and needs.num_choices <= least.num_choices
            and needs.has_priority <= least.has_priority
            and needs.task in self._common_tasks
        )


class AdapterNames:
    """Names of adapters behind a router. A model's name or alias goes before an adapter's. Owned by the router."""

    def __init__(self, aliases: Mapping[str, str], kinds: Callable[[], Iterable[EngineKind]]) -> None:
        """
        Args:
            aliases: Other names of models -> the names that engines have for them.
            kinds: Returns the kinds of the ready engines.
        """
        self._aliases = aliases
        self._kinds = kinds

    def all(self) -> list[ModelTerms]:
        """Return each adapter that requests may name, with the model that it adapts."""
        by_name: dict[str, ModelTerms] = {}
        for kind in self._kinds():
            for name, facts in kind.adapters.items():
                if not self._means_model(name):
                    by_name.setdefault(name, replace(kind.terms, adapter=facts))
        return list(by_name.values())

    def terms(self, kind: EngineKind, name: str) -> ModelTerms:
        """Return the terms of a kind that serves the model or the adapter of this name."""
        facts = None if self._means_model(name) else kind.adapters.get(name)
        return kind.terms if facts is None else replace(kind.terms, adapter=facts)

    def find(self, adapter: str, serving: Iterable[EngineKind], path: str) -> ModelTerms:
        """Return the terms of an adapter that is named beside its model.

        Args:
            serving: The kinds that serve the model.
            path: Path of the adapter's name in the client's words.

        Raises:
            ModelNotFound: None of the kinds has such an adapter.
        """
        for kind in serving:
            if (facts := kind.adapters.get(adapter)) is not None:
                return replace(kind.terms, adapter=facts)
        names = ", ".join(sorted(terms.name for terms in self.all())) or "none is loaded"
        raise ModelNotFound(f"{path}: no engine has the adapter {adapter!r:.256}; loaded: {names}")

    def check(self, name: str) -> None:
        """Refuse a name for an adapter by which no request would get it.

        Raises:
            InvalidRequest: It is an alias, or the name of a model.
        """
        if name in self._aliases:
            raise InvalidRequest("name", f"{name!r} is an alias of the model {self._aliases[name]!r}")
        if self._means_model(name):
            raise InvalidRequest("name", f"{name!r} is the name of a model")

    def _means_model(self, name: str) -> bool:
        return name in self._aliases or any(kind.terms.model.name == name for kind in self._kinds())


def key_of(model: ModelFacts) -> KindKey:
    """Return the name of the kind that serves a model. Weights and numerics do not count before the first token."""
    return model.name, model.identity.fingerprint, model.vocab_size, model.eos_token_ids


def group_by_kind(engines: Iterable[EngineClient]) -> Mapping[KindKey, EngineKind]:
    """Return the kinds of the ready engines, in the order of their first ones."""
    groups: dict[KindKey, list[EngineClient]] = {}
    for engine in engines:
        if engine.is_ready and engine.welcome is not None and engine.welcome.model is not None:
            groups.setdefault(key_of(engine.welcome.model), []).append(engine)
    return {key: EngineKind(group) for key, group in groups.items()}


def _common_adapters(welcomes: Sequence[EngineWelcome]) -> Mapping[str, AdapterFacts]:
    """Return the adapters of engines by name: of one that is not the same everywhere, that of the most engines."""
    counts = Counter((facts.name, facts.digest) for welcome in welcomes for facts in welcome.adapters)
    chosen: dict[str, AdapterFacts] = {}
    for facts in (facts for welcome in welcomes for facts in welcome.adapters):
        known = chosen.setdefault(facts.name, facts)
        if counts[facts.name, facts.digest] > counts[known.name, known.digest]:
            chosen[facts.name] = facts
    return chosen


def has_adapter(welcome: EngineWelcome, wanted: AdapterFacts | None) -> bool:
    """Return whether an engine has an adapter, by name and digest. None: a request without one fits everywhere."""
    return wanted is None or any(
        (facts.name, facts.digest) == (wanted.name, wanted.digest) for facts in welcome.adapters
    )


def why_unfit(welcome: EngineWelcome, needs: RequestNeeds) -> str:
    """Return why a request does not fit an engine that serves its model; empty if it does."""
    limits, model = welcome.limits, welcome.model
    if model is None:
        return "it has not been ready yet"
    if needs.num_tokens > model.max_model_len:
        return f"max_model_len: {model.max_model_len} is below the {needs.num_tokens} tokens that the request may have"
    if needs.num_choices > limits.max_choices:
        return f"max_choices: {limits.max_choices} is below the {needs.num_choices} choices of the request"
    if needs.has_priority and not limits.has_priorities:
        return "scheduler.policy: it has no priorities, and the request has one"
    if needs.task not in model.tasks:
        return f"tasks: {', '.join(model.tasks)} are served, and not {needs.task}"
    return ""


def why_of_another_kind(welcome: EngineWelcome, key: KindKey) -> str:
    """Return why an engine is not of a kind, with both values; empty if it is."""
    if welcome.model is None:
        return "it has not been ready yet"
    names = ("model", "fingerprint", "vocab_size", "eos_token_ids")
    for name, own, wanted in zip(names, key_of(welcome.model), key, strict=True):
        if own != wanted:
            return f"{name}: {_shown(own)}, not {_shown(wanted)}"
    return ""


def terms_of(welcome: EngineWelcome) -> ModelTerms:
    """Return the terms of one engine, which has been ready."""
    assert welcome.model is not None, "an engine that was ready has sent its model"
    return ModelTerms(welcome.model, welcome.limits, welcome.model.max_model_len)


def leave_out_prefilling(engines: Sequence[EngineClient]) -> list[EngineClient]:
    """Leave out the engines that prefill for others, unless there are no others."""
    return [e for e in engines if welcome_of(e).role is not EngineRole.PREFILL] or list(engines)


def least_loaded(engines: Sequence[EngineClient]) -> EngineClient:
    """Return the engine with the fewest choices from here in flight; of several, any."""
    return min(engines, key=lambda engine: (engine.num_in_flight, random.random()))


def welcome_of(engine: EngineClient) -> EngineWelcome:
    """Return the welcome of a ready engine."""
    assert engine.welcome is not None, "a ready engine has been welcomed"
    return engine.welcome


def facts_of(engine: EngineClient) -> ModelFacts:
    """Return the model of a ready engine."""
    model = welcome_of(engine).model
    assert model is not None, "a ready engine has sent its model"
    return model


def _shown(value: object) -> str:
    return f"{value!s:.40}"
