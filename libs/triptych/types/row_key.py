"""The name of a row."""

from __future__ import annotations

from typing import NamedTuple


class RowKey(NamedTuple):
    """The name of a row in a session: never two rows of one session have the same."""

    slot: int
    slot_version: int
