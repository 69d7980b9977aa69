"""What the worker says of native kernels that it cannot use."""

from __future__ import annotations

import logging
import re

import pytest

from services.worker.runner import create


@pytest.mark.parametrize(
    ("isa", "refusal", "said"),
    [
        ("amx", "", None),
        ("", "", "none are built for this processor"),
        (
            "avx512_bf16",
            "Operation not permitted",
            r"has AMX, .* \(Operation not permitted\); avx512_bf16 serves",
        ),
    ],
)
def test_kernels_that_are_missing_are_told_with_the_reason(
    isa: str,
    refusal: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(create, "isa", lambda: isa)
    monkeypatch.setattr(create, "amx_refusal", lambda: refusal)
    with caplog.at_level(logging.INFO):
        create._warn_of_missing_kernels()
    if said is None:
        assert caplog.records == []
        return
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(said, record.getMessage())
