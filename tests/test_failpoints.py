"""Failpoints: every place that has a name is in the code once, and a process fails where it is told to."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from triptych import failpoints
from triptych.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def test_each_place_is_reached_by_the_code_of_its_tier() -> None:
    found = Counter[str]()
    for path in (ROOT / "services").rglob("*.py"):
        for name in re.findall(r'failpoints\.reach\("(.+?)"\)', path.read_text()):
            found[name] += 1
            assert path.relative_to(ROOT).parts[1] == name.partition(".")[0], f"{path} is no code of {name}"
    assert found == Counter(list(failpoints.PLACES))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker.lunch:kill", "there is no place 'worker.lunch'"),
        ("worker.after_step:explode", "'explode' is not one of kill, stop"),
        ("worker.after_step", "'' is not one of kill, stop"),
        ("worker.after_step:kill@0", "'0' is not a number of times"),
        ("worker.after_step:kill@soon", "'soon' is not a number of times"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        failpoints.parse(text)


def test_nothing_is_armed_unless_asked_for() -> None:
    assert not failpoints.ARMED
    assert failpoints.parse("") == {}
    failpoints.reach("worker.after_step")


def test_a_process_is_killed_at_the_last_of_so_many_times() -> None:
    code = """
from triptych import failpoints
for number in range(5):
    print(number, flush=True)
    failpoints.reach("worker.before_result")
    failpoints.reach("worker.after_result")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={failpoints.ENV: "worker.after_result:kill@3", "PYTHONPATH": f"{ROOT / 'libs'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-9, "0\n1\n2\n")
