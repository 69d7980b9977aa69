"""Clients of others, unchanged, against the stack: answers, streams, calls, forms. `make test-clients` runs them.

The model is small: what it says is not looked at, but that streamed and whole answers are one, and that demanded calls
and forms are what was demanded, which the grammar holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from triptych.launcher.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.model]

Run = Callable[[str, str], Any]
RAIN = {"rain in Paris", "rain in Rome"}


def is_pet(value: Any) -> bool:
    return value.keys() == {"name", "kind"} and len(value["name"]) <= 20 and value["kind"] in ("cat", "dog")


def are_calls(calls: Any) -> bool:
    """Return whether there are calls, and all of the tool that there is, with a city that it knows."""
    return bool(calls) and all(
        call[0] == "weather" and call[1]["city"] in ("Paris", "Rome") for call in calls
    )


def assert_alike(got: dict[str, Any]) -> None:
    assert got["whole"]
    assert got["streamed"] == got["whole"]


def test_langchain(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("langchain_client.py", f"http://{stack.http_address}/v1")
    assert_alike(got)
    assert got["responses"] == got["whole"]
    assert got["batch"] == 3
    assert "Paris" in got["completion"]
    for method in ("json_schema", "function_calling"):
        assert is_pet(got[method])
    assert set(got["set"]) <= {"small", "large"}
    assert got["best_of"] == 2
    assert got["verbosity"] == got["whole"], "it changes nothing"
    for choice in ("weather", "any"):
        assert set(got[f"tools {choice}"]) == {"weather"}


def test_openai_agents(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("openai_agents_client.py", f"http://{stack.http_address}/v1")
    for api in ("chat", "responses"):
        assert_alike(got[api])
        assert got[api]["streamed_at_end"] == got[api]["whole"]
        assert got[api]["usage"] > 0
        assert got[api]["tool"] in RAIN
        assert is_pet(got[api]["form"])
    assert got["chat"]["whole"] == got["responses"]["whole"]


def test_litellm(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("litellm_client.py", f"http://{stack.http_address}")
    for provider in ("openai", "hosted_vllm", "anthropic"):
        answers = got[provider]
        assert_alike(answers)
        assert answers["usage"] == [12, 12]
        assert are_calls(answers["calls"])
        assert answers["streamed_calls"] == answers["calls"]
        assert answers["answered"] in ("stop", "length", "tool_calls")
        assert is_pet(answers["form"])
    assert "Paris" in got["text"]
    assert got["responses"]
    assert got["messages"].startswith(got["openai"]["whole"]), "it asks for 16 tokens in place of 12"


def test_instructor(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("instructor_client.py", f"http://{stack.http_address}")
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS", "ANTHROPIC_TOOLS", "partial"):
        assert is_pet(got[mode]), mode
    assert got["num_partial"] > 1


def test_pydantic_ai(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("pydantic_ai_client.py", f"http://{stack.http_address}/v1")
    for api in ("chat", "responses"):
        assert_alike(got[api])
        assert got[api]["usage"] == 12
        assert got[api]["tool"] in RAIN
        for form in ("form", "form_by_tool", "streamed_form"):
            assert is_pet(got[api][form]), form


def test_smolagents(stack: LocalCluster, run_python: Run) -> None:
    got = run_python("smolagents_client.py", f"http://{stack.http_address}/v1")
    assert_alike(got)
    assert are_calls(got["calls"])
    assert got["streamed_calls"] == got["calls"]
    assert is_pet(got["form"])


def test_openai_in_javascript(stack: LocalCluster, run_node: Run) -> None:
    got = run_node("openai_client.mjs", f"http://{stack.http_address}")
    for api in ("chat", "responses"):
        assert_holds_to_forms(got[api])
    assert got["chat"]["whole"] == got["responses"]["whole"]


def test_anthropic_in_javascript(stack: LocalCluster, run_node: Run) -> None:
    got = run_node("anthropic_client.mjs", f"http://{stack.http_address}")
    assert_holds_to_forms(got)
    assert got["answered"] == "assistant"
    assert got["num_tokens"] > 0


def test_ai_sdk_in_javascript(stack: LocalCluster, run_node: Run) -> None:
    got = run_node("ai_sdk_client.mjs", f"http://{stack.http_address}")
    assert_holds_to_forms(got)
    assert got["finish"] == "length"
    assert all(output == f"rain in {given['city']}" for _, given, output in got["calls"])
    kinds = got["record"]["kinds"]
    assert kinds.keys() == {"cat", "dog"}
    assert all(isinstance(value, bool) for value in kinds.values())


def assert_holds_to_forms(got: dict[str, Any]) -> None:
    assert_alike(got)
    assert got["usage"] == 12
    assert are_calls(got["calls"])
    assert got["streamed_calls"] == got["calls"]
    assert is_pet(got["form"])
    assert got["streamed_form"] == got["form"]
