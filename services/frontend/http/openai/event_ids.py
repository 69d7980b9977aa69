"""The ids of server-sent events, by which a client goes on with a stream that broke: TOKEN:3.17f."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import astuple

from triptych.errors import InvalidRequest
from triptych.types.events import DeltaEvent
from triptych_services.frontend.streams.resume import ResumeToken, SeenChoice

LAST_EVENT_ID_HEADER = "Last-Event-ID"
MAX_CHOICES_WITH_IDS = 32
"""Each id has the position of every choice."""
_POSITION = re.compile(r"(\d{1,10})(f?)")


def parse_event_id(text: str) -> tuple[ResumeToken, dict[int, SeenChoice]]:
    """Return the token, and what the client has of each choice.

    Raises:
        InvalidRequest: It is no id of an event of ours.
    """
    token, _, positions = text.rpartition(":")
    parsed = ResumeToken.parse(token, LAST_EVENT_ID_HEADER)
    matches = [_POSITION.fullmatch(position) for position in positions.split(".")]
    seen = {
        index: SeenChoice(int(match[1]), bool(match[2]))
        for index, match in enumerate(matches)
        if match is not None
    }
    if len(seen) != len(matches) or len(seen) != parsed.num_choices:
        raise InvalidRequest(LAST_EVENT_ID_HEADER, f"{positions!r:.80} is not the position of every choice")
    return parsed, seen


class StreamIds:
    """The ids of a stream's events: its token, and the output tokens of each choice that a client has by then."""

    def __init__(self, num_choices: int, seen: Mapping[int, SeenChoice] | None = None) -> None:
        """`seen`: What a client has that goes on with a stream. None: nothing, not even its opening."""
        self.is_resumed = seen is not None
        self._token = ""
        seen = seen or {}
        choices = [seen.get(index, _NOTHING) for index in range(num_choices)]
        self._counts = [choice.num_tokens for choice in choices]
        self._positions = [_position(*astuple(choice)) for choice in choices]

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client has."""
        return sum(self._counts)

    @property
    def open_choice(self) -> int:
        """Index of a choice that the client has not seen end."""
        return next(index for index, place in enumerate(self._positions) if not place.endswith(_FINISHED))

    def set_token(self, token: str) -> None:
        """Take the token by which the stream goes on; empty: it does not."""
        self._token = token

    def line(self) -> str:
        """Return the id of an event that changes no position; empty if the stream cannot go on elsewhere."""
        return f"id: {self._token}:{'.'.join(self._positions)}\n" if self._token else ""

    def advance(self, delta: DeltaEvent) -> str:
        """Return the id of the event that brings this delta."""
        index = delta.index
        self._counts[index] += len(delta.token_ids)
        self._positions[index] = _position(self._counts[index], delta.finish_reason is not None)
        return self.line()


_NOTHING = SeenChoice()
_FINISHED = "f"


def _position(num_tokens: int, is_finished: bool) -> str:
    return f"{num_tokens}{_FINISHED}" if is_finished else str(num_tokens)
