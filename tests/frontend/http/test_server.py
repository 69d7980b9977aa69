"""The server ends when it is told, and knows the date."""

from __future__ import annotations

import asyncio
import time

from tests.helpers.http_api import DEADLINE_S, open_api


async def test_it_ends_when_it_is_told_and_not_at_the_next_look(monkeypatch):
    monkeypatch.setattr("triptych_services.frontend.http.server._DATE_S", 10 * DEADLINE_S)
    async with open_api() as api:
        assert (await api.http.get("/ping")).status_code == 200
        async with asyncio.timeout(DEADLINE_S):
            await api.server.stop(2 * DEADLINE_S)


async def test_answers_have_the_date_of_now(monkeypatch):
    monkeypatch.setattr("triptych_services.frontend.http.server._DATE_S", 0.001)
    now = 0.0
    monkeypatch.setattr(
        "uvicorn.server.time", type("Time", (), {"time": lambda: now, "monotonic": time.monotonic})
    )
    async with open_api() as api, asyncio.timeout(DEADLINE_S):
        assert (await api.http.get("/ping")).headers["date"] == "Thu, 01 Jan 1970 00:00:00 GMT"
        now = 86400.0
        while (await api.http.get("/ping")).headers["date"] != "Fri, 02 Jan 1970 00:00:00 GMT":
            await asyncio.sleep(0)
