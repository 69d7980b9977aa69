"""Signs of life of one engine: its messages, its answers to heartbeats, and how its streams end."""

from __future__ import annotations

import math
import time

from triptych.rpc.status import is_connection_refused
from triptych.types.submit import EngineWelcome

HEARTBEAT_S = 0.33
"""Seconds of silence after which an engine with requests is asked for a sign of life, and asked again."""


class Liveness:
    """Owned by the engine's client. All times are on the monotonic clock."""

    def __init__(self) -> None:
        self.heard_at = 0.0
        """When the last message came."""
        self.lost_at = 0.0
        """When the last stream broke."""
        self.is_refused = False
        """The address refuses connections: the process has ended."""
        self.has_died = False
        """The process that the session was with has ended, unless it has said that it would."""
        self._asked_at = 0.0
        """When something was submitted to it last that was idle. It had no reason to speak before."""
        self._heartbeat_at = 0.0
        """When a sign of life was asked for last."""
        self._has_stream = False
        self._has_heartbeats = False
        """The engine answers heartbeats."""

    def begin(self, *, has_heartbeats: bool) -> None:
        """Note that a stream has begun. `has_heartbeats`: The engine answers heartbeats on it."""
        self._has_stream, self._has_heartbeats = True, has_heartbeats
        self.has_died = self.is_refused = False
        self.note_message()

    def note_message(self) -> None:
        self.heard_at = time.monotonic()

    def note_asked(self) -> None:
        """Note that something is submitted to it while nothing is in flight."""
        self._asked_at = time.monotonic()

    def note_process(self, before: EngineWelcome | None, welcome: EngineWelcome) -> None:
        """Note which process answers. `before`: the last welcome, maybe of another one."""
        if before is not None and welcome.boot_id != before.boot_id:
            self.has_died = before.ready

    def end(self, error: BaseException | None, welcome: EngineWelcome | None) -> None:
        """Note that the stream, or the attempt at one, has ended. `welcome`: the last one."""
        if self._has_stream:
            self.lost_at = time.monotonic()
        self._has_stream = False
        self.is_refused = is_connection_refused(error)
        self.has_died = self.is_refused and welcome is not None and welcome.ready

    def silent_for(self, now: float) -> float:
        """Return the seconds without a message; 0 without a stream or without answers to heartbeats."""
        return now - self._quiet_since if self._has_stream and self._has_heartbeats else 0.0

    def due_at(self, after_silence_s: float) -> float:
        """Return when to ask for a sign of life, or when its silence is too long; inf: it answers no heartbeats."""
        if not (self._has_stream and self._has_heartbeats):
            return math.inf
        return min(
            max(self._quiet_since, self._heartbeat_at) + HEARTBEAT_S, self._quiet_since + after_silence_s
        )

    def take_heartbeat(self, now: float) -> bool:
        """Return whether to ask for a sign of life now: none has come or was asked for within a moment."""
        is_due = now - max(self.heard_at, self._heartbeat_at) >= HEARTBEAT_S
        if not (is_due and self._has_stream and self._has_heartbeats):
            return False
        self._heartbeat_at = now
        return True

    @property
    def _quiet_since(self) -> float:
        return max(self.heard_at, self._asked_at)

    def pardon_silence(self, now: float) -> None:
        """Forget a silence: this process did not listen."""
        self.heard_at = max(self.heard_at, now)
