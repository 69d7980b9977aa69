"""What the worker says at start of the machine it computes on."""

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


@pytest.mark.parametrize(
    ("numa_nodes", "huge_pages", "warnings"),
    [
        (1, "madvise", []),
        (1, "always", []),
        (2, "madvise", ["2 memory nodes"]),
        (1, "never", ["none .never."]),
    ],
)
def test_what_the_host_withholds_is_told_with_a_remedy(
    numa_nodes: int, huge_pages: str, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        create._tell_of_host(3, numa_nodes, huge_pages)
    assert caplog.messages[0].startswith("computing with 3 threads on ")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == len(warnings)
    for message, expected in zip(told, warnings, strict=True):
        assert re.search(expected, message)
