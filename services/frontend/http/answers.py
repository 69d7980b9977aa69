"""Answers that every dialect sends: errors, and what monitors ask for."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


def to_json(value: Any) -> str:
    """Compact and pure ASCII, so that no character that a client sent can fail to be sent back."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class Answer(BaseModel):
    """A JSON object that the server sends."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class LoadAnswer(Answer):
    server_load: int
    """Requests that wait or run."""


class HealthAnswer(Answer):
    status: Literal["ready"]
    why_waiting: str = ""
    """Why requests wait that are taken: all engines of a model sleep or are paused. Absent: they do not."""


class PingAnswer(Answer):
    status: Literal["alive"]


class VersionAnswer(Answer):
    version: str


class ErrorFields(Answer):
    message: str
    """For people: names field, value and limit, everything that is wrong at once."""
    type: str
    param: str | None
    """Path of the first field that is wrong."""
    code: str | None
    """For machines; stable."""


class ErrorAnswer(Answer):
    """Any answer that is not 2xx."""

    error: ErrorFields


_STATUS_TO_MEANING = {
    400: "Something in the request is wrong, or not served; the message names all of it.",
    401: "No valid API key was sent.",
    403: "The API key does not permit this.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The queue is full, or a limit of the API key is used up; Retry-After says when to come back.",
    500: "The server failed; its log has the details under the request's id.",
    503: "The server cannot serve now; Retry-After says when to come back.",
    504: "The request ran out of time.",
}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds to wait."}}


def error_answers(*statuses: int, model: type[Answer] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of a route besides 200; any may also be 401 or 500.

    Args:
        model: Their form.
    """
    return {
        status: {
            "model": model,
            "description": _STATUS_TO_MEANING[status],
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in sorted({401, 500, *statuses})
    }


GENERATE_ERRORS = error_answers(400, 403, 404, 413, 429, 503, 504)
"""The answers of a route that generates, besides 200."""
