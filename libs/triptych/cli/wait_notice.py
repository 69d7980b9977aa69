"""Says why an answer does not begin, for example because engines sleep."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from triptych.cli.streaming import visible
from triptych.client.grpc_client import GenerationClient
from triptych.errors import TriptychError
from triptych.types.events import DeltaEvent, Event

AFTER_S = 2.0
"""Seconds without output after which the server is asked why; then again and again."""


class WaitNotice:
    """Asks the server why answers do not begin, and writes it to stderr once. One for all answers of a command."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._is_told = False
        self._asking = asyncio.Lock()

    async def watch(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of an answer; asks until the first of its output."""
        timer = asyncio.create_task(self._tell_later(), name="wait-notice")
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, DeltaEvent):
                        timer.cancel()
                    yield event
        finally:
            timer.cancel()

    async def _tell_later(self) -> None:
        while not self._is_told:
            await asyncio.sleep(AFTER_S)
            async with self._asking:
                if self._is_told:
                    return
                with contextlib.suppress(TriptychError):  # the answer's own error says more
                    if why := await self._client.why_waiting():
                        self._is_told = True
                        print(f"[{visible(why)}]", file=sys.stderr, flush=True)
