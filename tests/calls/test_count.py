"""The count of calls sees what is called in the sources, and the check fails above a mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.calls import count
from tests.calls.count import Calls
from triptych.prefix_hash import PLAIN_ROOT_HASH, hash_blocks, root_hash


def three_calls() -> tuple[Calls, int]:
    calls = Calls()
    with calls.counting():
        for _ in range(3):
            sorted([2, 1])
            hash_blocks(PLAIN_ROOT_HASH, b"", 16)
    return calls, 1


def test_calls_of_the_sources_are_counted() -> None:
    assert len(three_calls()[0]) == 3
    calls = Calls()
    with calls.counting():
        root_hash(b"")  # calls `_packed`, which runs a generator over one part to its end
    assert len(calls) == 4


@pytest.mark.parametrize(("mark", "status"), [(3, 0), (2, 1)])
def test_more_calls_than_the_mark_fail_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mark: int,
    status: int,
) -> None:
    marks = tmp_path / "marks.toml"
    marks.write_text(f"[three]\nmark = {mark}\n")
    monkeypatch.setattr(count, "MARKS", marks)
    monkeypatch.setattr(count, "COUNTS", {"three": three_calls})
    assert count.main() == status
    errors = capsys.readouterr().err
    assert ("three takes 3.0 Python calls, the mark is 2" in errors) == bool(status)
    assert ("prefix_hash.py" in errors) == bool(status)
