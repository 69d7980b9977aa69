"""The calls of docs/cookbook.md do what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.grpcurl import json_values, run
from triptych.launcher.local_cluster import LocalCluster

pytestmark = pytest.mark.model

COOKBOOK = Path(__file__).resolve().parents[2] / "docs" / "cookbook.md"
ANYTHING = "…"
_BLOCK = re.compile(
    r"```sh\n(?P<command>grpcurl .*?)```\n(?:```(?P<kind>json)?\n(?P<printed>.*?)```\n)?", re.DOTALL
)
RECIPES = [match.groupdict() for match in _BLOCK.finditer(COOKBOOK.read_text())]


def fits(seen: Any, expected: Any) -> bool:
    """Whether a value is as expected, where "…" is whatever it is."""
    if expected == ANYTHING:
        return True
    if isinstance(expected, dict) and isinstance(seen, dict):
        return seen.keys() == expected.keys() and all(fits(seen[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(seen, list):
        return len(seen) == len(expected) and all(map(fits, seen, expected))
    return bool(seen == expected)


def test_every_call_is_found() -> None:
    assert len(RECIPES) == COOKBOOK.read_text().count("\ngrpcurl ")


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: recipe["command"].split()[-1].rpartition("/")[2]
)
def test_a_call_answers_as_shown(recipe: dict[str, str], cluster: LocalCluster) -> None:
    addresses = {"127.0.0.1:50051": cluster.address, "127.0.0.1:50050": cluster.admin_address}
    printed = run(recipe["command"].replace("\\\n", " "), addresses)
    if recipe["kind"] == "json":
        seen, expected = json_values(printed), json_values(recipe["printed"])
        assert fits(seen, expected), printed
    elif recipe["printed"] is not None:
        expected = recipe["printed"].strip()
        seen = printed.strip()
        assert (
            seen.startswith(expected.removesuffix(ANYTHING))
            if expected.endswith(ANYTHING)
            else seen == expected
        )


def test_items_of_a_batch_fail_alone(cluster: LocalCluster) -> None:
    (recipe,) = [recipe for recipe in RECIPES if "BatchGenerate" in recipe["command"]]
    messages = json_values(run(recipe["command"], {"127.0.0.1:50051": cluster.address}))
    kinds = {tag: [kind(m) for m in messages if m["tag"] == tag] for tag in ("1", "2")}
    assert kinds == {"1": ["admitted", "output", "finished"], "2": ["error"]}


def kind(message: dict[str, Any]) -> str:
    if "error" in message:
        return "error"
    (event,) = message["event"].keys() - {"sequence"}
    return str(event)
