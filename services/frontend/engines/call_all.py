"""One call to several engines at once, with one report of those that refuse it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from triptych.errors import EngineUnavailable, TriptychError
from triptych_services.frontend.engines.client import EngineClient


async def call_all_engines(
    engines: Sequence[EngineClient], call: Callable[[EngineClient], Awaitable[Any]]
) -> list[Any]:
    """Call something of each engine, all at once, and wait for all.

    Args:
        call: Raises TriptychError where the engine refuses.

    Raises:
        EngineUnavailable: None is known.
        TriptychError: Some have refused: of the kind of the first refusal, naming each of them with its reason, and
            those that have carried it out.
    """
    if not engines:
        raise EngineUnavailable("no engine is known yet")
    answers = await asyncio.gather(*map(call, engines), return_exceptions=True)
    failures: dict[str, TriptychError] = {}
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, TriptychError):
            failures[engine.name] = answer
        elif isinstance(answer, BaseException):
            raise answer
    if failures:
        first = next(iter(failures.values()))
        if len(engines) > 1:
            done = [engine.name for engine in engines if engine.name not in failures]
            reasons = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
            first.message = f"{reasons}; carried out by {', '.join(done) or 'none'}"
            first.args = (first.message,)
        raise first
    return list(answers)
