"""Step-time profiles: written by `python -m tools.fit`, read by the simulated worker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, in the three numbers that its time depends on."""

    num_prefill_tokens: int
    """Tokens that were known when their row entered: bound by arithmetic."""
    num_decode_rows: int
    """Rows that compute a token sampled since: bound by reading the weights, once for all of them."""
    num_context_tokens: int
    """Keys and values that attention reads: summed over the rows, the position after the last token."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """A linear model of step time: base + the cost of each part of the work. Every coefficient is >= 0."""

    base_ms: float
    """Cost of every step: reading the weights, launching kernels."""
    prefill_token_us: float
    decode_row_us: float
    context_token_ns: float

    def step_ns(self, work: StepWork) -> int:
        """Return the duration of a step with this work, in ns."""
        return round(
            self.base_ms * 1e6
            + self.prefill_token_us * 1e3 * work.num_prefill_tokens
            + self.decode_row_us * 1e3 * work.num_decode_rows
            + self.context_token_ns * work.num_context_tokens
        )


_COEFFICIENTS = tuple(field.name for field in fields(StepTimeModel))
_ABOUT = "about"
"""Key of the notes for readers: the source of the numbers, and how well they fit. The simulation ignores it."""


def write_step_time_profile(path: Path, model: StepTimeModel, about: Mapping[str, object]) -> None:
    """Write the coefficients, and `about` beside them.

    Raises:
        ConfigError: the file cannot be written.
    """
    document = {_ABOUT: dict(about), **asdict(model)}
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"step-time profile {path}: cannot be written: {error.strerror}") from error


def read_step_time_profile(path: Path) -> StepTimeModel:
    """Read a profile that `write_step_time_profile` or a user wrote.

    Raises:
        ConfigError: no such file, a coefficient missing or below 0, or a key that means nothing; names it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"simulation.profile: {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"simulation.profile: {path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"simulation.profile: {path} must hold an object, not {type(document).__name__}")
    if unknown := document.keys() - {_ABOUT, *_COEFFICIENTS}:
        raise ConfigError(
            f"simulation.profile: {path}: {min(unknown)}: no such key; there are {', '.join(_COEFFICIENTS)}"
        )
    return StepTimeModel(**{name: _coefficient(path, document, name) for name in _COEFFICIENTS})


def _coefficient(path: Path, document: Mapping[str, object], name: str) -> float:
    value = document.get(name)
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"simulation.profile: {path}: {name}: {value!r} must be a number >= 0")
    return float(value)  # type: ignore[arg-type]
