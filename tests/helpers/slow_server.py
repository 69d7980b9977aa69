"""A server for load to be put on, and a clock that only sleeping moves."""

from __future__ import annotations

import asyncio

from triptych.client.load import run
from triptych.client.load.backends import TokenCounts


class Clock:
    """Time that only sleeping takes: the loop's own clock jumps to the next timer."""

    def __init__(self, monkeypatch) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr(run.time, "perf_counter", lambda: self.now_s)
        select = loop._selector.select

        def jump(timeout):
            events = select(0)
            if not events and timeout:
                self.now_s += timeout
            return events

        monkeypatch.setattr(loop._selector, "select", jump)


class Server:
    """Takes a second for the first token and a tenth for each further one; `max_running` at a time."""

    def __init__(self, max_running: int = 1000) -> None:
        self._places = asyncio.Semaphore(max_running)
        self.errors: list[Exception] = []

    async def answer(self, request, on_piece):
        async with self._places:
            if self.errors:
                raise self.errors.pop(0)
            await asyncio.sleep(1.0)
            on_piece()
            for _ in range(request.max_tokens - 1):
                await asyncio.sleep(0.1)
                on_piece()
            return TokenCounts(len(request.prompt), request.max_tokens)
