"""Counts that may fall and not rise."""

from __future__ import annotations

import pytest

from tools import ratchets
from tools.ratchets import LIMITS, Limit, hold


def test_ratchet_holds_at_its_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ratchets, "LIMITS", {"slips": Limit(now=2, target=1)})
    assert hold("slips", ["a:1", "b:2"])
    assert capsys.readouterr() == ("slips: 2 of 2 allowed; the target is 1\n", "")
    assert hold("slips", ["a:1"])
    assert capsys.readouterr() == ("slips: 1 of 2 allowed\n", "")
    assert not hold("slips", ["a:1", "b:2", "c:3"])
    assert capsys.readouterr() == ("", "a:1\nb:2\nc:3\nslips: 3, allowed are 2\n")


def test_limits_are_not_below_their_targets() -> None:
    assert {name: limit for name, limit in LIMITS.items() if limit.now < limit.target} == {}
