"""Words of docstrings and prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.verify_docstrings import fragments, idioms, is_prose


def test_fragments_are_found() -> None:
    source = '"""Of a file."""\ndef f():\n    """Return it."""\nclass A:\n    x = 1\n    """None: there is none."""\n'
    assert [place.split(":")[0] for place in fragments(source)] == ["1", "6"]


def test_idioms_are_found_across_lines() -> None:
    assert list(idioms("Nobody reads\nwhat stands here, as\nfar as we know.")) == [
        "1: Nobody",
        "2: stands",
        "2: as far as",
    ]
    assert list(idioms("It withstands whosever; somebodyelse.")) == []


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("README.md", True),
        ("protos/triptych/v1/sampling.proto", True),
        ("protos/triptych/compat/vllm.proto", False),
        ("libs/triptych/v1/sampling_pb2.py", False),
        ("tests/tools/test_fit.py", False),
        ("services/worker/app.py", True),
    ],
)
def test_prose_is_what_the_project_writes(name: str, counts: bool) -> None:
    assert is_prose(Path(name)) is counts
