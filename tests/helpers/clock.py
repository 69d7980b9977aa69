"""Jumps of the event loop's clock, for limits of time that must neither be waited for nor be met by a slow machine."""

from __future__ import annotations

import asyncio


async def pass_time(seconds: float) -> None:
    """Move the running loop's clock ahead, and return when the timers that are due then have fired.

    A limit that is long in real time, and over after this, holds on a machine of any speed. It ends timeouts of the
    caller and of clients, too, that are due by then.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
    for _ in range(3):  # timers fire, and what waits for them goes on
        await asyncio.sleep(0)
