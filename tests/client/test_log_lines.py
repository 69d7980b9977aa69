"""Messages of log lines without time, level and service."""

from __future__ import annotations

import logging

import pytest

from triptych.config import LogConfig
from triptych.observe import logging as observe_logging
from triptych.observe.logging import message_of


@pytest.mark.parametrize("format", ["text", "json"])
def test_the_message_of_a_log_line_comes_back(format, capsys):
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        observe_logging.configure(LogConfig(format=format), "worker")
        logging.getLogger("x").error("cannot serve: %s", "/m: no weights")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    line = capsys.readouterr().err.strip()
    assert message_of(line) == "cannot serve: /m: no weights"
    assert line != message_of(line)


@pytest.mark.parametrize("line", ["worker.port: 5 is taken", "{not json", '{"other": 1}', ""])
def test_other_lines_stay_as_they_are(line):
    assert message_of(line) == line
