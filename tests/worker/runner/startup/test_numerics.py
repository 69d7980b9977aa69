"""Workers of other numerics: the error names the arithmetic that differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.tiny import tiny_config
from triptych.types.identity import Likeness, ModelIdentity, compare
from triptych_kernels.cpu import library
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.runner.startup.facts import numerics_of


def identity(config: ResolvedConfig, processor: str = "avx2") -> ModelIdentity:
    numerics = numerics_of(config, processor=processor, block_size=16)
    return ModelIdentity("f", weights="w", numerics=numerics, is_batch_invariant=True)


def test_arithmetic_that_differs_between_workers_is_named() -> None:
    config = tiny_config()
    assert compare(identity(config), identity(config)).likeness is Likeness.TOKENS
    rounded = identity(replace(config, activation_bits=8))
    assert compare(identity(config), rounded).difference == "numerics: activation_bits 16 and 8"
    assert compare(identity(config), identity(config, "avx512")).difference == (
        "numerics: processor avx2 and avx512"
    )


def test_builds_of_the_kernels_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change of the kernels between two releases may change last bits under the same version."""
    monkeypatch.setattr(library, "DIGEST", tmp_path / "DIGEST")
    with library.forced_isa("avx2"):
        (tmp_path / "DIGEST").write_text("a" * 64)
        before = identity(tiny_config(), library.isa_and_build())
        (tmp_path / "DIGEST").write_text("b" * 64)
        after = identity(tiny_config(), library.isa_and_build())
    difference = compare(before, after).difference
    assert difference == f"numerics: processor avx2 of build {'a' * 16} and avx2 of build {'b' * 16}"
