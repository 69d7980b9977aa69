"""Named places where tests make a process fail: TRIPTYCH_FAILPOINTS="worker.before_result:kill@20".

A place costs one look at a constant unless the variable was set when the process started. Use:

    if failpoints.ARMED:
        failpoints.reach("worker.before_result")
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.errors import ConfigError

ENV = "TRIPTYCH_FAILPOINTS"
PLACES: Mapping[str, str] = {
    "frontend.before_submit": "a submit or an abort is kept, and not written yet",
    "frontend.after_submit": "a submit or an abort is written",
    "frontend.before_batch": "an output batch has arrived, and no stream has its tokens",
    "frontend.after_batch": "an output batch has taken effect, and is not acknowledged",
    "frontend.before_acknowledge": "an acknowledgement is due",
    "enginecore.before_welcome": "a frontend has its session, and does not know it",
    "enginecore.after_submit": "a request is in the inbox, and its message is not counted",
    "enginecore.after_abort": "an abort is in the inbox, and its message is not counted",
    "enginecore.before_step": "a step is planned, and not sent",
    "enginecore.after_step": "a step is sent",
    "enginecore.after_result": "a result has taken effect, and no frontend knows",
    "enginecore.before_outputs": "an output batch is kept, and not written",
    "enginecore.after_outputs": "an output batch is written",
    "enginecore.before_requeue": "the worker's session is given up, and its requests run still",
    "worker.before_welcome": "an engine holds the worker, and does not know it",
    "worker.after_step": "a step is taken",
    "worker.before_result": "a step is computed, and its result not written",
    "worker.after_result": "a result is written",
    "worker.after_goodbye": "the engine has left, and its session is here",
}
"""Name of each place -> what holds there."""
ACTIONS: Mapping[str, int] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""Name -> the signal that the process sends itself."""


@dataclass
class _Armed:
    """A place that fails when it is reached for the last of so many times."""

    action: str
    num_left: int


def reach(name: str) -> None:
    """Note that a place is reached, and fail if its turn has come."""
    armed = _armed.get(name)
    if armed is None:
        return
    armed.num_left -= 1
    if armed.num_left == 0:
        os.kill(os.getpid(), ACTIONS[armed.action])


def parse(text: str) -> dict[str, _Armed]:
    """Return what a value of the variable arms: NAME:ACTION[@TIMES], separated by commas.

    Raises:
        ConfigError: There is no such place or action; names those that there are.
    """
    armed = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = entry.partition(":")
        action, _, times = rest.partition("@")
        if name not in PLACES:
            raise ConfigError(f"{ENV}: there is no place {name!r}; there are {', '.join(PLACES)}")
        if action not in ACTIONS:
            raise ConfigError(f"{ENV}: {name}: {action!r} is not one of {', '.join(ACTIONS)}")
        if times and not (times.isdecimal() and int(times) > 0):
            raise ConfigError(f"{ENV}: {name}: {times!r} is not a number of times, 1 or more")
        armed[name] = _Armed(action, int(times or 1))
    return armed


_armed = parse(os.environ.get(ENV, ""))
ARMED = bool(_armed)
"""Whether any place may fail in this process."""
