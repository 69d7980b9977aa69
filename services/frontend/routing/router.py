"""Which engine takes a request: by model name, then by a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from triptych.errors import EngineUnavailable, InvalidRequest, ModelNotFound, QueueFull
from triptych.types.facts import ModelFacts
from triptych.types.step import U32
from triptych.types.submit import ModelTerms, RequestNeeds
from triptych_services.frontend.engines.client import EngineClient
from triptych_services.frontend.routing.kinds import (
    AdapterNames,
    EngineKind,
    KindKey,
    group_by_kind,
    has_adapter,
    key_of,
    least_loaded,
    leave_out_prefilling,
    welcome_of,
    why_of_another_kind,
    why_unfit,
)
from triptych_services.frontend.routing.policy import RoutingPolicy, create_policy
from triptych_services.frontend.routing.prefix_index import RoutedPrompt

_ENGINES_NAMED = 8  # in an error's message
_MAX_SHOWN = 256  # characters of a name that a client sent
_HASHED_LATER = 2048
"""Tokens of a prompt that is hashed only if that is needed. It takes the event loop 0.1 ms then."""


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
        self._engines: Sequence[EngineClient] = ()
        self._num_changes = 0
        self._kinds: tuple[int, Mapping[KindKey, EngineKind]] = (0, {})
        """The kinds of the ready engines, and the number of changes that they take in."""
        self.adapters = AdapterNames(aliases, lambda: self._known_kinds().values())
        """Names of adapters, which requests may give as their model."""
        self._takes_streams = False
        self._listeners: list[Callable[[], None]] = []
        self.changed = asyncio.Event()
        """Set by `on_change`; the task that waits for it clears it."""

    @property
    def engines(self) -> Sequence[EngineClient]:
        """All that are known now; the discovery replaces them."""
        return self._engines

    @engines.setter
    def engines(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines
        self.say_takes_streams(self._takes_streams)
        self.on_change()

    def say_takes_streams(self, takes_streams: bool) -> None:
        """Send all engines, and those to come, whether streams that began elsewhere can go on here."""
        self._takes_streams = takes_streams
        for engine in self._engines:
            engine.say_takes_streams(takes_streams)

    def on_change(self) -> None:
        """An engine's readiness or facts may have changed."""
        self._num_changes += 1
        self.changed.set()
        for listener in self._listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called at each change."""
        self._listeners.append(listener)

    @property
    def is_ready(self) -> bool:
        return any(engine.is_ready for engine in self.engines)

    @property
    def why_not_ready(self) -> str:
        """Each engine with its reason."""
        if not self.engines:
            return "no engine is ready (none is known yet)"
        reasons = {engine: engine.why_not_ready for engine in self.engines if not engine.is_ready}
        return f"no engine is ready ({_listed(reasons)})"

    @property
    def models(self) -> list[ModelFacts]:
        """The models of the ready engines, each name once."""
        by_name: dict[str, ModelFacts] = {}
        for kind in self._known_kinds().values():
            by_name.setdefault(kind.terms.model.name, kind.terms.model)
        return list(by_name.values())

    def find(
        self, model: str, path: str = "model", *, adapter: str = "", adapter_path: str = "adapter"
    ) -> ModelTerms:
        """The facts to check a request for `model` against, which may be an alias or an adapter; empty: the only model.

        Args:
            path: of the model's name in the client's words.
            adapter: An adapter that is named beside its model. Empty: none is.
            adapter_path: As `path`, of the adapter's name.

        Raises:
            EngineUnavailable: no engine is ready; says why.
            ModelNotFound: none of the ready engines serves it; names those served.
            InvalidRequest: no name is given although there are several.
        """
        serving = self._serving(model)
        if adapter and serving:
            return self.adapters.find(adapter, serving, adapter_path)
        if len(serving) == 1:
            return self.adapters.terms(serving[0], model)
        names = ", ".join(sorted(facts.name for facts in self.models))
        if not names:
            raise EngineUnavailable(self.why_not_ready)
        if not serving:
            raise ModelNotFound(f"{path}: no engine serves {model!r:.{_MAX_SHOWN}}; served: {names}")
        if not model and len(self.models) > 1:
            raise InvalidRequest(path, f"none is given, and there are several; name one of {names}")
        engines = leave_out_prefilling([engine for kind in serving for engine in kind.engines])
        chosen = least_loaded(engines)
        return self.adapters.terms(next(kind for kind in serving if chosen in kind.engines), model)

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
        retry_after_s = None
        refusing: list[EngineClient] = []
        for kind in self._serving(model):
            for engine in kind.engines:
                refusal_s = engine.refuses(priority, tenant)
                if refusal_s is None:
                    return
                refusing.append(engine)
                retry_after_s = refusal_s if retry_after_s is None else min(retry_after_s, refusal_s)
        if retry_after_s is not None:
            names = ", ".join(engine.name for engine in refusing)
            raise QueueFull(f"the queue of {names} is full", retry_after_s)

    def max_choices(self, model: str) -> int:
        """Return how many choices may be running and waiting for a model together, on all its ready engines."""
        return sum(kind.max_choices for kind in self._serving(model))

    def max_running(self, model: str = "") -> int:
        """Return how many choices may be running on all ready engines together.

        Args:
            model: Only on the engines that serve it. Empty: on all.
        """
        return sum(kind.max_running for kind in self._serving(model))

    def choose(
        self,
        wanted: ModelTerms,
        needs: RequestNeeds = RequestNeeds(),  # noqa: B008 # it is immutable
        *,
        tried: Collection[EngineClient] = (),
        prompt: RoutedPrompt | None = None,
    ) -> EngineClient:
        """Return a ready engine that can serve a request: the one that the policy prefers.

        Args:
            wanted: The facts that the request was checked against.
            needs: The demands of the request.
            tried: Engines that have refused the request.
            prompt: None: it plays no part.

        Raises:
            EngineUnavailable: There is none; says why of each.
        """
        engines = self.alike(wanted, needs, tried)
        if not engines:
            refusing = dict.fromkeys(tried, "it has refused the request")
            raise EngineUnavailable(
                f"no engine can take the request ({self.why_none(wanted, needs, refusing)}); try again"
            )
        return self.choose_among(engines, prompt, needs.num_choices)

    def choose_among(
        self, engines: Sequence[EngineClient], prompt: RoutedPrompt | None, num_choices: int
    ) -> EngineClient:
        """Return the one of these engines, at least one, that the policy prefers."""
        return engines[0] if len(engines) == 1 else engines[self._policy.choose(engines, prompt, num_choices)]

    def alike(
        self,
        wanted: ModelTerms,
        needs: RequestNeeds = RequestNeeds(),  # noqa: B008 # it is immutable
        tried: Collection[EngineClient] = (),
    ) -> Sequence[EngineClient]:
        """Return the ready engines that can serve a request, as `choose` does."""
        kind = self._known_kinds().get(key_of(wanted.model))
        if kind is None:
            return ()
        fits_all, adapter = kind.takes_everywhere(needs), wanted.adapter
        if fits_all and not tried and adapter is None:
            return kind.engines

        def is_fit(engine: EngineClient) -> bool:
            if engine in tried or not has_adapter(welcome_of(engine), adapter):
                return False
            return fits_all or not why_unfit(welcome_of(engine), needs)

        return list(filter(is_fit, kind.engines)) or list(filter(is_fit, kind.prefilling))

    def takes_everywhere(self, wanted: ModelTerms, needs: RequestNeeds) -> bool:
        """Return whether a request fits all ready engines that serve its model."""
        kind = self._known_kinds().get(key_of(wanted.model))
        return kind is not None and wanted.adapter is None and kind.takes_everywhere(needs)

    def why_none(self, wanted: ModelTerms, needs: RequestNeeds, own: Mapping[EngineClient, str]) -> str:
        """Return why no engine can take a request: the first fact of each that differs.

        Args:
            own: Reasons that the caller has for engines which could take it otherwise.
        """
        if not self.engines:
            return "none is known yet"
        reasons = {}
        for engine in self.engines:
            if not engine.is_ready:
                reasons[engine] = engine.why_not_ready
                continue
            welcome = welcome_of(engine)
            differs = why_of_another_kind(welcome, key_of(wanted.model)) or why_unfit(welcome, needs)
            if not differs and not has_adapter(welcome, wanted.adapter):
                differs = f"adapter: it has no {wanted.name!r} of the digest {wanted.adapter_digest:.12}"
            reasons[engine] = differs or own.get(engine, "it has no room now")
        return _listed(reasons)

    def read_prompt(self, wanted: ModelTerms, token_ids: U32, cache_salt: str) -> RoutedPrompt | None:
        """Return a prompt as `choose` looks at it; None if it would look at none.

        A long one is hashed, which takes 0.3 ms for 8,192 tokens, and which a thread may do as well. A short one is
        hashed once an engine is known to cache its first block.
        """
        kind = self._known_kinds().get(key_of(wanted.model))
        block_sizes = set() if kind is None else kind.block_sizes - {0}
        if not self._policy.looks_at_prompts or not block_sizes or len(self.engines) == 1:
            return None
        prompt = RoutedPrompt(token_ids, cache_salt, wanted.adapter_digest)
        if prompt.num_tokens > _HASHED_LATER:
            for block_size in block_sizes:
                prompt.keys(block_size)
        return prompt

    def namesakes(self) -> dict[str, list[str]]:
        """Return the names that several connected engines have, with the addresses of these."""
        found: dict[str, list[str]] = {}
        for engine in self.engines:
            if engine.is_connected:
                found.setdefault(engine.name, []).append(engine.address)
        return {name: addresses for name, addresses in found.items() if len(addresses) > 1}

    def by_id(self, engine_id: str) -> EngineClient:
        """The engine of this name or at this address, ready or not; empty: the only one.

        Raises:
            InvalidRequest: no such engine, or several of the name, or several and no name; names them.
        """
        names = ", ".join(engine.name for engine in self.engines)
        if not engine_id and len(self.engines) == 1:
            return self.engines[0]
        found = [
            engine for engine in self.engines if engine_id and engine_id in (engine.name, engine.address)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            addresses = ", ".join(engine.address for engine in found)
            raise InvalidRequest(
                "engine_id", f"{engine_id!r} is the name of several engines; give one of {addresses}"
            )
        raise InvalidRequest("engine_id", f"{engine_id!r} is none of the engines here: {names}")

    def _known_kinds(self) -> Mapping[KindKey, EngineKind]:
        """Return the kinds of the ready engines. Made once per change, since every request asks for them."""
        num_changes, kinds = self._kinds
        if num_changes != self._num_changes:
            num_changes = self._num_changes  # a change meanwhile, where a thread asks, makes them anew
            kinds = group_by_kind(self._engines)
            self._kinds = num_changes, kinds
        return kinds

    def _serving(self, model: str) -> Sequence[EngineKind]:
        """Return the kinds that serve a model, or an adapter; empty: all."""
        kinds = self._known_kinds().values()
        if not model:
            return list(kinds)
        serving = [kind for kind in kinds if kind.terms.model.name == model]
        if not serving and model in self._aliases:
            return [kind for kind in kinds if kind.terms.model.name == self._aliases[model]]
        return serving or [kind for kind in kinds if model in kind.adapters]


def _listed(reasons: Mapping[EngineClient, str]) -> str:
    """Return each engine with its reason, the first of many."""
    shown = [f"{engine.name}: {why}" for engine, why in list(reasons.items())[:_ENGINES_NAMED]]
    if len(reasons) > len(shown):
        shown.append(f"and {len(reasons) - len(shown)} more")
    return "; ".join(shown)
