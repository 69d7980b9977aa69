"""The typed errors of Triptych; `triptych.rpc.status` holds what each becomes on the wire.

Each says what to do. A bug is none of these: it stays whatever Python raised and becomes INTERNAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing wrong with one field of a request or a config."""

    field: str
    """Path of the field, as the client wrote it: `sampling.temperature`, `messages[2].role`."""
    description: str
    """Names the value and the limit: `3.0 is above the limit 2`."""
    value: str = ""
    """The value alone, for machines. Empty: it is not a number."""
    limit: str = ""
    """The limit alone. Empty: there is none."""

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class TriptychError(Exception):
    """Root of what we raise on purpose. `code` is stable, for machines; the message is for people."""

    code = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = {}
        """The numbers and names of the message, for machines; travels in google.rpc.ErrorInfo."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how it is pickled: as it is, since subclasses take other arguments than `Exception` keeps."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[TriptychError], args: tuple[Any, ...], attributes: dict[str, Any]) -> TriptychError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class InvalidRequest(TriptychError):
    """The client's request can never work as it is; carries every violation found."""

    code = "INVALID_REQUEST"

    def __init__(self, violations: Sequence[FieldViolation] | str, description: str | None = None) -> None:
        if isinstance(violations, str):
            violations = [FieldViolation(violations, description or "is not valid")]
        self.violations = tuple(violations)
        super().__init__("; ".join(str(v) for v in self.violations))


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context."""

    code = "CONTEXT_LENGTH_EXCEEDED"

    def __init__(self, violations: Sequence[FieldViolation] | str, description: str | None = None) -> None:
        super().__init__(violations, description)
        if len(self.violations) == 1:  # clients look for OpenAI's wording, which names no field
            self.message = self.violations[0].description


class ModelNotFound(TriptychError):
    """No engine serves this model, or no such model can be had."""

    code = "MODEL_NOT_FOUND"


class FeatureDisabled(TriptychError):
    """The protocol knows this field, but this build or configuration does not serve it."""

    code = "FEATURE_DISABLED"

    def __init__(self, features: Sequence[str] | str, why: str) -> None:
        """
        Args:
            features: Fields, methods or options, as the client or the operator wrote them.
        """
        self.features = (features,) if isinstance(features, str) else tuple(features)
        self.why = why
        super().__init__(f"{', '.join(self.features)}: {why}")


class Unauthenticated(TriptychError):
    """The call has no API key that this server knows. It never says what is wrong with the one that came."""

    code = "INVALID_API_KEY"


class PermissionDenied(TriptychError):
    """The API key is known, but must not do this."""

    code = "PERMISSION_DENIED"


class WrongState(TriptychError):
    """The call is supported, but not in the present state of the engine."""

    code = "WRONG_STATE"


class DuplicateRequest(TriptychError):
    """A request with this id is alive."""

    code = "DUPLICATE_REQUEST"


class QueueFull(TriptychError):
    """The waiting queue is at its bound; try again after `retry_after_s`."""

    code = "QUEUE_FULL"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineUnreachable(QueueFull):
    """The predicted time to the first token is past the request's deadline."""

    code = "DEADLINE_UNREACHABLE"


class RateLimited(QueueFull):
    """The API key has used up a limit of its own; try again after `retry_after_s`."""

    code = "RATE_LIMIT_EXCEEDED"


class DeadlineExceeded(TriptychError):
    """The request's time ran out."""

    code = "DEADLINE_EXCEEDED"


class EngineUnavailable(TriptychError):
    """No engine can take requests now and nothing has been sent; safe to retry."""

    code = "ENGINE_UNAVAILABLE"


class GenerationLost(TriptychError):
    """The engine was lost after tokens were sent, and the request could not be moved."""

    code = "GENERATION_LOST"


class NotKept(TriptychError):
    """There is no stream to go on with: it is over, or was never kept."""

    code = "NOT_KEPT"


class AttachedElsewhere(TriptychError):
    """The stream goes on at another frontend, to which its client has turned."""

    code = "ATTACHED_ELSEWHERE"


class ConfigError(TriptychError):
    """A config file, environment variable or flag that stops the boot; names key, value, range, source."""

    code = "CONFIG"


class ModelError(TriptychError):
    """Model files that are missing, cut short or not understood."""

    code = "MODEL"


class HandshakeMismatch(TriptychError):
    """Two tiers disagree on something both must share; names the key and both values."""

    code = "HANDSHAKE_MISMATCH"


class WorkerAsleep(EngineUnavailable):
    """The worker's memory is given back until it is woken; safe to retry after that."""

    code = "WORKER_ASLEEP"


class MemoryShort(TriptychError):
    """There is not the memory now for what is asked; names what is needed and what is free."""

    code = "MEMORY_SHORT"


class WorkerHeld(TriptychError):
    """Another live engine holds this worker; names it."""

    code = "WORKER_HELD"


class StaleEpoch(TriptychError):
    """An engine that started later has taken this one's place at the worker; this one must end."""

    code = "STALE_EPOCH"


class ProtocolViolation(TriptychError):
    """The other side broke the protocol of a stream between two tiers; the stream ends."""

    code = "PROTOCOL_VIOLATION"


class SequenceGap(ProtocolViolation):
    """A message is not the one after the last: something between is missing."""

    code = "SEQUENCE_GAP"


class RankUnavailable(TriptychError):
    """A worker of the same group did not come, or is gone; all ranks must start anew."""

    code = "RANK_UNAVAILABLE"


class EngineFailure(TriptychError):
    """One request failed inside the engine or worker, through no fault of the client."""

    code = "ENGINE_FAILURE"
