"""Step times on file."""

from __future__ import annotations

import json

import pytest

from triptych.config.step_times import StepTimeModel, read_step_time_profile, write_step_time_profile
from triptych.errors import ConfigError

MODEL = StepTimeModel(base_ms=1.25, prefill_token_us=0.1, decode_row_us=3, context_token_ns=0)


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "times.json"
    write_step_time_profile(path, MODEL, {"journal": "x", "num_steps": 3})
    assert read_step_time_profile(path) == MODEL
    assert json.loads(path.read_text())["about"] == {"journal": "x", "num_steps": 3}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_ms": None}, "base_ms: None must be a number >= 0"),
        ({"base_ms": -1}, "base_ms: -1 must"),
        ({"context_token_ns": True}, "context_token_ns: True must"),
        ({"decode_row_us": "1"}, "decode_row_us: '1' must"),
        ({"prefill_token_us": float("nan")}, "prefill_token_us: nan must"),
        ({"prefil_token_us": 1}, "prefil_token_us: no such key; there are base_ms, prefill_token_us"),
    ],
)
def test_a_bad_profile_is_refused_by_file_key_and_value(tmp_path, changes, says):
    path = tmp_path / "times.json"
    write_step_time_profile(path, MODEL, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError) as caught:
        read_step_time_profile(path)
    assert f"{path}: {says}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"times\.json"):
        read_step_time_profile(path)


def test_a_file_that_cannot_be_had_is_told_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_step_time_profile(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_step_time_profile(tmp_path / "absent" / "x", MODEL, {})
