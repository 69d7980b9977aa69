"""Reading of a request's body: JSON, the fields of a schema, a raw request; on a thread where that takes long."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.message import Message
from json import decoder
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from services.frontend.openai.in_flight import ClientGone
from services.frontend.openai.request_body import Body, to_violations
from services.frontend.work_threads import WorkThreads
from triptych.errors import FieldViolation, InvalidRequest

# 8 kB hold at most 270 messages, which are read in about 3 ms.
_INLINE_BYTES = 8192

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class BodyReader:
    """Reads bodies for the routes; owned by the app."""

    def __init__(self) -> None:
        # One thread: readers of JSON hold the interpreter's lock, so that a second one would only slow the loop.
        self._threads = WorkThreads(1, inline_size=_INLINE_BYTES, what="long bodies")

    async def read(self, request: Request, kind: type[B], convert: Callable[[B], T]) -> T:
        """Return what `convert` makes of the request's body.

        Raises:
            InvalidRequest: The body is no JSON object. What is wrong with its fields stands in `Body.violations`.
            QueueFull: Too many long bodies wait to be read.
        """
        try:
            data = await request.body()
        except ClientDisconnect:
            raise ClientGone from None
        if not data:
            raise InvalidRequest("", "the body is missing; send a JSON object")
        if not _is_json(request.headers.get("content-type", "")):
            raise InvalidRequest(
                "", "the body must be a JSON object, sent with Content-Type: application/json"
            )
        return await self._threads.run(len(data), _read, data, kind, convert)


def _read(data: bytes, kind: type[B], convert: Callable[[B], T]) -> T:
    try:
        value = loads_in_parts(data.decode(json.detect_encoding(data), "surrogatepass"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest("", f"the body is not valid JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("", f"the body cannot be read: {error}") from None
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest([_not_an_object(error)]) from None
    return convert(body)


def loads_in_parts(text: str) -> Any:
    """Do what `json.loads` does, but let other threads run between the entries of top-level lists and objects.

    `json.loads` is one call into C, which holds the interpreter's lock to its end: 20 ms for 131,072 token ids.
    """
    scan_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # in C; for what stands deeper

    def scan(text: str, index: int) -> tuple[Any, int]:
        if text[index : index + 1] == "[":
            return decoder.JSONArray((text, index + 1), scan)  # type: ignore[attr-defined]
        return scan_once(text, index)

    start = decoder.WHITESPACE.match(text, 0).end()  # type: ignore[attr-defined]
    try:
        if text[start : start + 1] == "{":
            value, end = decoder.JSONObject((text, start + 1), True, scan, None, None)  # type: ignore[attr-defined]
        else:
            value, end = scan(text, start)
    except StopIteration as stop:
        raise json.JSONDecodeError("Expecting value", text, stop.value) from None
    end = decoder.WHITESPACE.match(text, end).end()  # type: ignore[attr-defined]
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    is_application = message.get_content_maintype() == "application"
    return is_application and (subtype == "json" or subtype.endswith("+json"))


def _not_an_object(error: ValidationError) -> FieldViolation:
    (detail, *_) = error.errors(include_url=False, include_context=False)
    if detail["type"] == "heap":
        return FieldViolation("", f"the body has too many fields: {detail['msg']}")
    if detail["loc"]:
        return to_violations([detail])[0]
    return FieldViolation("", "the body must be a JSON object, sent with Content-Type: application/json")
