"""Names that nothing but tests uses."""

from __future__ import annotations

import pytest

from tools.verify_callers import unused

SOURCE = '''
"""Mentions only_in_docstring."""
import grpc
LIMIT = 3
class Queue:
    """Mentions Queue.only_in_docstring."""
    def __len__(self): return 0
    def push(self): return self.push_all()
    def push_all(self): ...
    def only_in_docstring(self): ...
    @property
    def size(self): ...
    @command("run")
    def registered(self): ...
def calls_itself(): return calls_itself()
class Handler(grpc.Handler):
    def called_by_grpc(self): ...
'''


def names_found(*sources: str) -> list[str]:
    found = unused({f"{number}.py": source for number, source in enumerate(sources)})
    return [place.split(": ")[1] for place in found]


def test_unused_names_are_found() -> None:
    names = [
        "LIMIT",
        "Queue",
        "Queue.push",
        "Queue.only_in_docstring",
        "Queue.size",
        "calls_itself",
        "Handler",
    ]
    assert names_found(SOURCE) == names


@pytest.mark.parametrize(
    "use",
    ["print(LIMIT)", "f(LIMIT=1)", "getattr(module, 'LIMIT')", "print(module.LIMIT)", "import_('m:LIMIT')"],
)
def test_a_use_in_another_file_counts(use: str) -> None:
    assert "LIMIT" not in names_found(SOURCE, use)


@pytest.mark.parametrize("mention", ["# LIMIT", "LIMIT = 4", "module.LIMIT = 4", "'''Mentions LIMIT.'''"])
def test_a_mention_is_no_use(mention: str) -> None:
    assert "LIMIT" in names_found(SOURCE, mention)


def test_words_of_other_texts_count() -> None:
    assert list(unused({"a.py": "def main(): ..."}, ["triptych = a:main"])) == []
