"""Batch files in OpenAI's form: one request per line in, one answer per line out, in the order of the answers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from triptych.client.http_client import HttpAnswer
from triptych.errors import ConfigError, TriptychError

RETRIED_STATUSES = (429, 502, 503, 504)
"""Answers that say that a later attempt may succeed."""
_URL = re.compile("/v1/[!-~]+")
_MAX_SHOWN = 20  # bad lines that an error names


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of an input file."""

    custom_id: str
    """Names the request in the output."""
    url: str
    """Path of the route: /v1/chat/completions, /v1/completions or another that takes POST."""
    body: bytes
    """JSON."""


def check_input(file: Path) -> list[str]:
    """Return the ids of all requests of a file.

    Raises:
        ConfigError: It cannot be read, or lines are no requests; names each such line by its number.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is no file that can be read twice")
    ids: dict[str, int] = {}
    problems = []
    for number, line in _lines(file):
        try:
            request = _parse(line)
            if request.custom_id in ids:
                raise ValueError(f"custom_id {request.custom_id!r} is that of line {ids[request.custom_id]}")
            ids[request.custom_id] = number
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f"\nand {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise ConfigError(f"{file}: " + "\n".join(problems[:_MAX_SHOWN]) + more)
    if not ids:
        raise ConfigError(f"{file}: holds no request")
    return list(ids)


def read_requests(file: Path, but: Collection[str]) -> Iterator[BatchRequest]:
    """Yield the requests of a file that `check_input` has seen, without those of the ids in `but`."""
    for _, line in _lines(file):
        request = _parse(line)
        if request.custom_id not in but:
            yield request


class BatchOutput:
    """The file that answers are added to. An existing one is continued. No other process may write to it."""

    def __init__(self, file: Path) -> None:
        """Keep the answers that the file has, and drop those that another attempt may better, and half a line.

        Raises:
            ConfigError: It holds something else, or cannot be written.
        """
        self._file = file
        self.answered: set[str] = set()
        """Ids of the requests that need not be sent again."""
        try:
            if file.exists() and not file.is_file():
                raise ConfigError(f"{file}: is no file that can be read again and gone on with")
            self._stream = _open_locked(file)
            try:
                self._take_over(file)
            except BaseException:
                self._stream.close()
                raise
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror or error}") from None

    def add(self, request: BatchRequest, result: HttpAnswer | TriptychError) -> bool:
        """Write the result of a request, and return whether it succeeded.

        Raises:
            ConfigError: The file cannot be written.
        """
        line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id}
        if isinstance(result, HttpAnswer):
            response = {
                "status_code": result.status,
                "request_id": result.headers.get("x-request-id", ""),
                "body": _body(result.body),
            }
            self._write({**line, "response": response, "error": None})
            return result.status == 200
        error = {"code": result.code.lower(), "message": str(result)}
        self._write({**line, "response": None, "error": error})
        return False

    def close(self) -> None:
        """Return when all is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(line).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror or error}") from None

    def _take_over(self, file: Path) -> None:
        new = file.with_name(f".{file.name}.new")
        is_changed = False
        kept = new.open("wb")
        try:
            _lock(kept, file)
            with file.open("rb") as old:
                for number, line in enumerate(old, start=1):
                    custom_id, is_final = _read_answer(line) if line.endswith(b"\n") else ("", False)
                    if custom_id is None:
                        raise ConfigError(
                            f"{file}: line {number} is no answer of a batch; name another output"
                        )
                    if is_final and custom_id not in self.answered:
                        self.answered.add(custom_id)
                        kept.write(line)
                    else:
                        is_changed = True
            if is_changed:
                kept.flush()
                os.fsync(kept.fileno())
                os.replace(new, file)
                self._stream, kept = (
                    kept,
                    self._stream,
                )  # the old file stays locked until the new one is there
        finally:
            kept.close()
            new.unlink(missing_ok=True)


def _open_locked(file: Path) -> BinaryIO:
    """Open a file to add to it, and keep other processes that open it in this way out until it is closed.

    Raises:
        ConfigError: Another process writes to it.
    """
    while True:
        stream = file.open("ab")
        try:
            _lock(stream, file)
            if os.path.samestat(os.fstat(stream.fileno()), file.stat()):
                return stream
        except FileNotFoundError:
            pass  # moved away since it was opened
        except BaseException:
            stream.close()
            raise
        stream.close()  # another process has put a new file into its place since


def _lock(stream: BinaryIO, file: Path) -> None:
    """Lock an open file until it is closed; `file` is for the error."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{file}: another run-batch is writing to it; wait for its end, or name another output"
        ) from None


def _read_answer(line: bytes) -> tuple[str | None, bool]:
    """Return the id of a line of output, None if it is no such line, and whether the answer can stay."""
    try:
        answer = json.loads(line)
        custom_id, response = answer["custom_id"], answer["response"]
        is_final = response is not None and response["status_code"] not in RETRIED_STATUSES
        return str(custom_id), is_final
    except (ValueError, TypeError, KeyError):
        return None, False


def _body(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return {"error": {"message": body[:1000].decode(errors="replace")}}


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each line that is not blank."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


def _parse(line: bytes) -> BatchRequest:
    """Raises ValueError with everything that is wrong with the line."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    custom_id, url, body = (value.get(name) for name in ("custom_id", "url", "body"))
    method = value.get("method", "POST")
    problems = []
    if not isinstance(custom_id, str) or not custom_id:
        problems.append(f"custom_id: expected text, not {custom_id!r:.40}")
    if method != "POST":
        problems.append(f"method: expected POST, not {method!r:.40}")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        problems.append(f"url: expected a path like /v1/chat/completions, not {url!r:.60}")
    if not isinstance(body, dict):
        problems.append(f"body: expected an object, not {body!r:.40}")
    elif body.get("stream"):
        problems.append("body.stream: an answer in a file cannot be streamed")
    if problems:
        raise ValueError("; ".join(problems))
    return BatchRequest(str(custom_id), str(url), json.dumps(body).encode())
