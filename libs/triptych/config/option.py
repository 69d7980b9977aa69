"""The declaration of one option: its range, its meaning, who reads it, and who must hold the same value."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

FRONTEND, ENGINE, WORKER = ("frontend",), ("enginecore",), ("worker",)
"""The packages of `triptych_services` that read an option."""
ALL = FRONTEND + ENGINE + WORKER

ENV_PREFIX = "TRIPTYCH_"


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a value, its meaning, its readers, and which processes must hold the same value."""

    help: str
    read_by: tuple[str, ...]
    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    choices: tuple[str, ...] = ()
    shared: bool = False
    """Whether an engine and its worker must hold the same value; the hello carries it."""
    per_rank: bool = False
    """Whether the ranks of one worker group may hold different values."""

    def describe(self) -> str:
        """Return the allowed range in words, empty if any value is allowed."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        parts = [
            f"{sign} {bound:.15g}"
            for sign, bound in ((">=", self.ge), (">", self.gt), ("<=", self.le))
            if bound is not None
        ]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class Option:
    """One value an operator may set, with the names it has in each source."""

    leaf: str
    """The section, as the field of `EngineConfig` is called."""
    name: str
    type: type
    default: Any
    limits: Limits

    @property
    def key(self) -> str:
        return f"{self.leaf}.{self.name}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.leaf}_{self.name}".upper()

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")


def value(
    default: Any,
    help: str,
    read_by: tuple[str, ...],
    *,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    choices: tuple[str, ...] = (),
    shared: bool = False,
    per_rank: bool = False,
) -> Any:
    """Declare one option: its default, its meaning (with the unit), its readers and its range.

    Args:
        shared: see `Limits`.
        per_rank: see `Limits`.
    """
    limits = Limits(help, read_by, ge=ge, le=le, gt=gt, choices=choices, shared=shared, per_rank=per_rank)
    if default is MISSING:
        raise ValueError("every option has a default")
    return field(default=default, metadata={"limits": limits})
