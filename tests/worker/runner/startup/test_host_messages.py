"""Messages of the worker about its machine at start."""

from __future__ import annotations

import logging
import re

import pytest

from tests.worker.tiny import tiny_architecture
from triptych.config import EngineConfig
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.startup import create


@pytest.mark.parametrize(
    ("missing", "dtype", "refusal", "said"),
    [
        ("", "bfloat16", "", None),
        (
            "",
            "float16",
            "",
            "they take float32 and bfloat16, not model.dtype = float16; plain torch computes",
        ),
        (
            "none for Darwin on arm64",
            "float32",
            "",
            "none for Darwin .* plain torch computes in float32, several",
        ),
        (
            "",
            "bfloat16",
            "Operation not permitted",
            r"has AMX, .* \(Operation not permitted\); avx512_bf16 serves",
        ),
    ],
)
def test_kernels_that_are_missing_are_told_with_the_reason(
    missing: str,
    dtype: str,
    refusal: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(create, "isa", lambda: "avx512_bf16")
    monkeypatch.setattr(create, "amx_refusal", lambda: refusal)
    with caplog.at_level(logging.INFO):
        create.warn_of_missing_kernels(missing, dtype)
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
        (1, "none", []),
    ],
)
def test_what_the_host_withholds_is_told_with_a_remedy(
    numa_nodes: int, huge_pages: str, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        create.report_host(3, numa_nodes, huge_pages)
    assert caplog.messages[0].startswith("computing with 3 threads on ")
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == len(warnings)
    for message, expected in zip(told, warnings, strict=True):
        assert re.search(expected, message)


@pytest.mark.parametrize(
    ("stored", "dtype", "said"),
    [
        ("float16", "bfloat16", ["rounded to bfloat16, 8 of 11 significant bits"]),
        ("float16", "float32", ["computed in float32, which is exact"]),
        ("bfloat16", "float32", []),
        ("float16", "float16", []),
    ],
)
def test_what_becomes_of_float16_is_logged(
    stored: str, dtype: str, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        create.report_rounding(ResolvedConfig(EngineConfig(), tiny_architecture(dtype=stored), dtype=dtype))
    assert len(caplog.messages) == len(said)
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))
