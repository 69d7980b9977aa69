"""The live view of an engine: a line per interval, as `vmstat` has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from triptych.types.facts import STATUS_ROWS

_COLUMNS: dict[str, int] = {
    "time": 8,
    "state": 10,
    "running": 8,
    "waiting": 8,
    "blocks": 8,
    "cached": 8,
    "step ms": 8,
    "tokens/s": 9,
    "ended/s": 8,
    "hits": 7,
    **{row.heading: len(row.heading) + 1 for row in STATUS_ROWS.values() if row.heading},
}
"""Heading -> width, the space before it included.
Rates, hits of the prefix cache and the counters behind them are those since the line before."""
_NUM_SINCE = list(_COLUMNS)[::-1].index("step ms")
_LINES_PER_HEAD = 20


def watch(statuses: Iterable[Any], state_of: Callable[[Any], str], write: Callable[[str], None]) -> None:
    """Write a line for each EngineStatus as it comes.

    Args:
        state_of: Puts the state of a status into a word.
    """
    before: Any = None
    before_s = 0.0
    for number, status in enumerate(statuses):
        now_s = time.monotonic()
        if number % _LINES_PER_HEAD == 0:
            write("".join(f" {name:>{width - 1}}" for name, width in _COLUMNS.items()))
        values = (
            time.strftime("%H:%M:%S"),
            state_of(status),
            str(status.num_running),
            str(status.num_waiting),
            _percent(status.num_used_blocks, status.num_blocks),
            _percent(status.num_cached_blocks, status.num_blocks),
            f"{status.step_ns / 1e6:.1f}",
            *(
                _since(before, status, max(now_s - before_s, 1e-6))
                if before is not None
                else ("-",) * _NUM_SINCE
            ),
        )
        write("".join(f" {text:>{width - 1}}" for text, width in zip(values, _COLUMNS.values(), strict=True)))
        before, before_s = status, now_s


def _since(before: Any, now: Any, elapsed_s: float) -> tuple[str, ...]:
    """Return what happened between two statuses; counters that fell belong to an engine that began anew."""

    def more(name: str) -> int:
        return max(0, getattr(now, name) - getattr(before, name))

    ended = sum(entry.count for entry in now.num_finished) - sum(entry.count for entry in before.num_finished)
    return (
        f"{more('num_scheduled_tokens') / elapsed_s:.0f}",
        f"{max(0, ended) / elapsed_s:.1f}",
        _percent(more("prefix_hits"), more("prefix_queries")),
        *(str(more(name)) for name, row in STATUS_ROWS.items() if row.heading),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"
