"""The limit of open files is raised at start, and connections are made to fit it."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys

import pytest

from triptych.errors import ConfigError
from triptych.rpc.open_files import RESERVE, fit_connections

PROGRAM = (
    "import resource; from triptych.rpc.open_files import raise_file_limit; "
    "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
)


@pytest.mark.parametrize(("soft", "hard"), [(256, 700), (300, 300)])
def test_soft_limit_becomes_the_hard_one(soft: int, hard: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    assert ended.stdout.split() == [str(hard)] * 3


def test_connections_that_fit_stay(caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"a": 3000, "b": 1000}
    assert fit_connections(wanted, RESERVE + 4000) == wanted
    assert not caplog.records


def test_connections_that_do_not_fit_are_lowered_alike(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert fit_connections({"a": 3000, "b": 1000}, RESERVE + 403) == {"a": 302, "b": 100}
    (record,) = caplog.records
    assert "a 3000, b 1000 do not fit: 915 files" in record.getMessage()
    assert record.getMessage().endswith("now a 302, b 100")


@pytest.mark.parametrize("num_files", [0, RESERVE, RESERVE + 3])
def test_too_few_files_are_refused(num_files: int) -> None:
    with pytest.raises(ConfigError, match=rf"^a 3000, b 1000: {num_files} files may be open"):
        fit_connections({"a": 3000, "b": 1000}, num_files)
