"""Logs: one line per event, UTC, as text or JSON. Lines about a request carry its id, and that of its trace."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import time
from typing import Any

from triptych.config import LogConfig
from triptych.observe.log_writer import BatchingHandler
from triptych.observe.trace import current_trace

_FIELDS = "fields"
_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z \w+ +\S+ +(.*)")
_PLAIN_WORD = re.compile(r'[^ ="\n\r]+')
_LEVELS = {"WARNING": "WARN"}
_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)
_CHATTY = ("asyncio", "uvicorn", "uvicorn.access", "uvicorn.error", "httpx", "filelock")

log = logging.getLogger(__name__)


def configure(config: LogConfig, service: str, *, is_batched: bool = False) -> None:
    """Send this process's log to stderr. Call once, first.

    Args:
        is_batched: Lines below WARNING may come 50 ms later, so that many of them cost one write. `logging.shutdown`,
            which Python calls at a usual end of the process, writes the last ones.
    """
    handler = BatchingHandler(sys.stderr) if is_batched else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if config.format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    _apply_level(config.level)


def set_level(level: str) -> None:
    """Print lines of this severity and above from now on: debug, info, warning or error."""
    log.log(max(logging.getLogger().level, logging.INFO), "log level set", extra=with_fields(level=level))
    _apply_level(level)


def with_fields(**values: Any) -> dict[str, Any]:
    """`extra=` of a log call: values that print as key=value, or as JSON members."""
    return {_FIELDS: values}


def message_of(line: str) -> str:
    """Return the message of a log line in either format, without time, level and service.

    Other lines are returned unchanged.
    """
    if line.startswith("{"):
        try:
            return str(json.loads(line)["message"])
        except (ValueError, KeyError):
            return line
    match = _TEXT_LINE.fullmatch(line)
    return match[1] if match else line


def _apply_level(level: str) -> None:
    root = logging.getLogger()
    root.setLevel(level.upper())
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        words = [
            _utc(record),
            _LEVELS.get(record.levelname, record.levelname).ljust(5),
            self._service.ljust(8),
        ]
        words.append(_one_line(record.getMessage()))
        words += [f"{key}={_word(value)}" for key, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(entry)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a line, the trace that it belongs to behind them."""
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    trace_id = current_trace().trace_id
    return {**fields, "trace_id": trace_id} if trace_id else fields


def _utc(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@functools.lru_cache(maxsize=2)
def _second(unix_s: int) -> str:
    """Return a second as text. Most lines are of the same one as those before them."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


def _one_line(text: str) -> str:
    """A client's text must not forge a second line."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _word(value: Any) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)
