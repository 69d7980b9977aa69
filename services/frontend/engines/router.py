"""Which engine takes a request: by model name, then by a policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from services.frontend.engines.client import EngineClient
from services.frontend.engines.prefix_index import RoutedPrompt
from services.frontend.engines.routing_policy import RoutingPolicy, create_policy
from triptych.errors import EngineUnavailable, InvalidRequest, ModelNotFound, QueueFull
from triptych.types.facts import ModelFacts
from triptych.types.identity import ModelIdentity
from triptych.types.kv_transfer import EngineRole
from triptych.types.step import U32
from triptych.types.submit import EngineWelcome


class Router:
    """The engines of this frontend."""

    def __init__(
        self, aliases: Mapping[str, str] = MappingProxyType({}), policy: RoutingPolicy | None = None
    ) -> None:
        """Start without engines.

        Args:
            aliases: Other names of models -> the names that engines have for them.
            policy: None: that of `frontend.routing` by default.
        """
        self._aliases = aliases
        self._policy = policy or create_policy("prefix")
        self.engines: Sequence[EngineClient] = ()
        """All that are known now; the discovery replaces them."""
        self.changed = asyncio.Event()
        """Set by `on_change`; whoever waits for it clears it."""

    def on_change(self) -> None:
        """An engine's readiness or facts may have changed."""
        self.changed.set()

    @property
    def is_ready(self) -> bool:
        return any(engine.is_ready for engine in self.engines)

    @property
    def why_not_ready(self) -> str:
        """Each engine with its reason."""
        reasons = [f"{engine.name}: {engine.why_not_ready}" for engine in self.engines if not engine.is_ready]
        return "no engine is ready (" + ("; ".join(reasons) or "none is known yet") + ")"

    @property
    def models(self) -> list[ModelFacts]:
        """The models of the ready engines, each name once."""
        by_name: dict[str, ModelFacts] = {}
        for engine in self.engines:
            if engine.is_ready and engine.welcome is not None and engine.welcome.model is not None:
                by_name.setdefault(engine.welcome.model.name, engine.welcome.model)
        return list(by_name.values())

    def find(self, model: str, path: str = "model") -> EngineWelcome:
        """The facts to check a request for `model` against, which may be an alias; empty: the only model.

        Args:
            path: of the model's name in the client's words.

        Raises:
            EngineUnavailable: no engine is ready; says why.
            ModelNotFound: none of the ready engines serves it; names those served.
            InvalidRequest: no name is given although there are several.
        """
        models = self.models
        if not models:
            raise EngineUnavailable(self.why_not_ready)
        names = ", ".join(sorted(facts.name for facts in models))
        if not model and len(models) > 1:
            raise InvalidRequest(path, f"none is given, and there are several; name one of {names}")
        serving = self._serving(model)
        if not serving:
            raise ModelNotFound(f"{path}: no engine serves {model!r}; served: {names}")
        return self._welcome_of(self.least_loaded(self._preferred(serving)))

    def aliases_of(self, model: str) -> tuple[str, ...]:
        """Return the other names of a model, as `engines` name it."""
        return tuple(alias for alias, name in self._aliases.items() if name == model)

    def check_free_places(self, model: str, priority: int, tenant: str) -> None:
        """Refuse a request that every engine is known to refuse, before anything is done for it.

        Args:
            model: As for `find`; one that is not served is left to that.

        Raises:
            QueueFull: The queues are full; says when to come back.
        """
        engines = self._serving(model)
        retry_after_s = None
        for engine in engines:
            refusal_s = engine.refuses(priority, tenant)
            if refusal_s is None:
                return
            retry_after_s = refusal_s if retry_after_s is None else min(retry_after_s, refusal_s)
        if retry_after_s is not None:
            names = ", ".join(engine.name for engine in engines)
            raise QueueFull(f"the queue of {names} is full", retry_after_s)

    def max_choices(self, model: str) -> int:
        """Return how many choices may be running and waiting for a model together, on all its ready engines."""
        return sum(self._welcome_of(engine).limits.max_choices for engine in self._serving(model))

    def choose(
        self,
        wanted: EngineWelcome,
        *,
        tried: Collection[EngineClient] = (),
        prompt: RoutedPrompt | None = None,
        num_choices: int = 1,
    ) -> EngineClient:
        """Return a ready engine with the facts that a request was checked against: the one that the policy prefers.

        Args:
            tried: Engines that have refused the request.
            prompt: None: it plays no part.
            num_choices: Choices of the request.

        Raises:
            EngineUnavailable: There is none.
        """
        alike = self._alike(wanted, tried)
        if not alike:
            raise EngineUnavailable(self.why_not_ready)
        return alike[0] if len(alike) == 1 else alike[self._policy.choose(alike, prompt, num_choices)]

    def read_prompt(self, wanted: EngineWelcome, token_ids: U32, cache_salt: str) -> RoutedPrompt | None:
        """Return a prompt as `choose` looks at it, with the keys that it looks up; None if it would look at none.

        Takes 0.3 ms for 8,192 tokens, which a thread may do as well.
        """
        block_sizes = {engine.outlook.block_size for engine in self._alike(wanted)}
        if not self._policy.looks_at_prompts or not any(block_sizes) or len(self.engines) == 1:
            return None
        prompt = RoutedPrompt(token_ids, cache_salt)
        for block_size in block_sizes - {0}:
            prompt.keys(block_size)
        return prompt

    def has_others(self, wanted: EngineWelcome, tried: Collection[EngineClient]) -> bool:
        """Return whether `choose` would find another engine."""
        return bool(self._alike(wanted, tried))

    def by_id(self, engine_id: str) -> EngineClient:
        """The engine of this name, ready or not; empty: the only one.

        Raises:
            InvalidRequest: no such engine, or several and no name; names them.
        """
        names = ", ".join(engine.name for engine in self.engines)
        if not engine_id and len(self.engines) == 1:
            return self.engines[0]
        for engine in self.engines:
            if engine_id and engine.name == engine_id:
                return engine
        raise InvalidRequest("engine_id", f"{engine_id!r} is none of the engines here: {names}")

    def _alike(self, wanted: EngineWelcome, tried: Collection[EngineClient] = ()) -> list[EngineClient]:
        """Return the ready engines with these facts."""
        alike = [e for e in self.engines if e.is_ready and e not in tried and _has_facts(e, wanted)]
        return self._preferred(alike)

    def _preferred(self, engines: list[EngineClient]) -> list[EngineClient]:
        """Leave out the engines that prefill for others, unless there are no others."""
        return [e for e in engines if self._welcome_of(e).role is not EngineRole.PREFILL] or engines

    def _serving(self, model: str) -> list[EngineClient]:
        """Return the ready engines that serve a model; empty: any."""
        ready = [engine for engine in self.engines if engine.is_ready]
        if not model:
            return ready
        serving = [engine for engine in ready if _serves(engine, model)]
        if not serving and model in self._aliases:
            return [engine for engine in ready if _serves(engine, self._aliases[model])]
        return serving

    @staticmethod
    def least_loaded(engines: Sequence[EngineClient]) -> EngineClient:
        return min(engines, key=lambda engine: (engine.num_in_flight, random.random()))

    @staticmethod
    def _welcome_of(engine: EngineClient) -> EngineWelcome:
        assert engine.welcome is not None, "a ready engine has been welcomed"
        return engine.welcome


def _serves(engine: EngineClient, model: str) -> bool:
    if not engine.is_ready or engine.welcome is None or engine.welcome.model is None:
        return False
    return engine.welcome.model.name == model


def _has_facts(engine: EngineClient, wanted: EngineWelcome) -> bool:
    welcome = engine.welcome
    if welcome is None:
        return False
    return (_facts_of(welcome), welcome.limits) == (_facts_of(wanted), wanted.limits)


def _facts_of(welcome: EngineWelcome) -> ModelFacts | None:
    """Return what a request is checked against. Any weights and numerics will do for it."""
    model = welcome.model
    return None if model is None else replace(model, identity=ModelIdentity(model.identity.fingerprint))
