"""Two plans of one step, compared field by field, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest

import numpy as np

from triptych.types.step import NewRow, StepPlan, empty_u32
from triptych.wire.step import plan_to_proto

_SHOWN = 6  # values of a column, from the first that differs
_COLUMN_TO_SLOTS = {
    "removed_slots": "removed_slots",
    "chunk_slots": "chunk_slots",
    "chunk_lengths": "chunk_slots",
    "skipped_slots": "skipped_slots",
    "block_slots": "block_slots",
    "block_ids": "block_slots",
    "block_groups": "block_slots",
    "state_slots": "state_slots",
    "state_pages": "state_slots",
    "sample_slots": "sample_slots",
    "sample_limits": "sample_slots",
}
"""A column of a plan -> the one that says which slot each of its entries is about."""
_ROW_FIELDS = (
    "slot",
    "slot_version",
    "token_ids",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_cached_tokens",
    "block_ids",
    "sampling",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not as it was."""

    field: str
    recorded: str
    now: str
    slots: frozenset[int] = frozenset()
    """Slots concerned, where they are known."""

    def __str__(self) -> str:
        return f"{self.field}: recorded {self.recorded}, now {self.now}"


def is_same(recorded: StepPlan | None, now: StepPlan | None) -> bool:
    """Whether a worker would get the same bytes."""
    return _encoded(recorded) == _encoded(now)


def differences_between(recorded: StepPlan | None, now: StepPlan | None) -> list[Difference]:
    """The fields that differ, in the order of the plan; of a column the first entry that does."""
    if recorded is None or now is None:
        return [Difference("step", _describe(recorded), _describe(now))]
    differences: list[Difference] = []
    for field in fields(StepPlan):
        before, after = getattr(recorded, field.name), getattr(now, field.name)
        if field.name == "new_rows":
            differences += _row_differences(before, after)
        elif field.name in _COLUMN_TO_SLOTS:
            if not np.array_equal(before, after):
                differences.append(_column_difference(field.name, recorded, now))
        elif before != after:
            differences.append(Difference(field.name, str(before), str(after)))
    return differences


def _encoded(plan: StepPlan | None) -> bytes:
    return b"" if plan is None else plan_to_proto(plan).SerializeToString(deterministic=True)


def _describe(plan: StepPlan | None) -> str:
    return "none" if plan is None else f"step {plan.step_id} of {plan.num_tokens} tokens"


def _column_difference(name: str, recorded: StepPlan, now: StepPlan) -> Difference:
    before, after = getattr(recorded, name), getattr(now, name)
    place = _first_difference(before, after)
    slots = {
        int(column[place])
        for plan in (recorded, now)
        if place < len(column := getattr(plan, _COLUMN_TO_SLOTS[name]))
    }
    return Difference(f"{name}[{place}]", _entry(before, place), _entry(after, place), frozenset(slots))


def _row_differences(recorded: Sequence[NewRow], now: Sequence[NewRow]) -> Iterator[Difference]:
    if len(recorded) != len(now):
        place = _first_difference((row.slot for row in recorded), (row.slot for row in now))
        slots = {row.slot for row in (*recorded[place:], *now[place:])}
        yield Difference("new_rows", f"{len(recorded)} rows", f"{len(now)} rows", frozenset(slots))
    for index, (before, after) in enumerate(zip(recorded, now, strict=False)):
        slots = {before.slot, after.slot}
        compared = [(name, getattr(before, name), getattr(after, name)) for name in _ROW_FIELDS]
        tables = zip_longest(before.group_block_ids, after.group_block_ids, fillvalue=empty_u32())
        compared += [(f"group_block_ids[{group}]", *pair) for group, pair in enumerate(tables)]
        for field_name, then, today in compared:
            name = f"new_rows[{index}].{field_name}"
            if not isinstance(then, np.ndarray):
                if then != today:
                    yield Difference(name, str(then), str(today), frozenset(slots))
            elif not np.array_equal(then, today):
                place = _first_difference(then, today)
                yield Difference(
                    f"{name}[{place}]", _entry(then, place), _entry(today, place), frozenset(slots)
                )


def _first_difference(before: Iterable[int], after: Iterable[int]) -> int:
    """Return the index of the first difference between two unequal columns, or the length of the shorter."""
    return next(place for place, (a, b) in enumerate(zip_longest(before, after)) if a != b)


def _entry(column: np.ndarray, place: int) -> str:
    """From this place on, with what follows; `nothing` past the end."""
    shown = column[place : place + _SHOWN].tolist()
    if not shown:
        return "nothing"
    rest = ", …" if len(column) > place + _SHOWN else ""
    return f"{', '.join(map(str, shown))}{rest}"
