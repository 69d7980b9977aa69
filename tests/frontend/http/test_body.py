"""Bodies read in parts are as json.loads reads them, and long ones are read beside the loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.garbage import without_collector
from tests.helpers.http_api import open_api
from triptych_services.frontend.http import body as reading
from triptych_services.frontend.http.anthropic.schema import MessagesRequest
from triptych_services.frontend.http.openai.responses.schema import ResponsesRequest
from triptych_services.frontend.http.openai.schema import ChatCompletionRequest
from triptych_services.frontend.requests.json_text import read_json_in_parts

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def outcome(load: Any, text: str) -> Any:
    try:
        return load(text)
    except json.JSONDecodeError as error:
        return (error.msg, error.pos)


@settings(deadline=None)
@given(values, st.sampled_from([None, 1]))
def test_any_value_is_read_as_json_reads_it(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert read_json_in_parts(text) == json.loads(text)


@pytest.mark.thorough
@settings(deadline=None, max_examples=300)
@given(values, st.data())
def test_what_is_no_json_is_refused_at_the_same_place(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = data.draw(st.integers(0, len(text)))
    broken = (
        text[:cut] + data.draw(st.sampled_from(["", "]", "}", ",", "x", '"', "[", "{"])) + text[cut + 1 :]
    )
    assert outcome(read_json_in_parts, broken) == outcome(json.loads, broken)


@pytest.mark.parametrize(
    "text", ["", " ", "[1,", '{"a":', "nope", "[1] 2", "{} x", "[[1], [2, {}], []]", "NaN"]
)
def test_odd_texts(text: str) -> None:
    assert repr(outcome(read_json_in_parts, text)) == repr(outcome(json.loads, text))


def test_reading_leaves_nothing_to_the_collector() -> None:
    with without_collector() as left:
        for _ in range(100):
            read_json_in_parts('{"prompt": [[1, 2], [3]], "n": 1}')
    assert left["_json.Scanner"] < 100


async def test_a_long_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, int] = {}

    def spy(text: str) -> Any:
        threads[len(text)] = threading.get_ident()
        return json.loads(text)

    monkeypatch.setattr(reading, "read_json_in_parts", spy)
    async with open_api() as servicer:
        for size in (100, 10_000):
            await servicer.post("/v1/completions", '{"prompt": "a"}'.ljust(size))
    assert threads[100] == threading.get_ident() != threads[10_000]


_MANY = 300
_ODD = {f"odd{number}": 0 for number in range(200)}
_PART = {"type": "text", "text": "x", **_ODD}
LISTS: list[tuple[type[reading.Body], dict[str, Any]]] = [
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x", **_ODD}] * _MANY}),
    (MessagesRequest, {"messages": [{"role": "user", "content": "x", **_ODD}] * _MANY}),
    (MessagesRequest, {"messages": [{"role": "user", "content": [_PART] * _MANY}]}),
    (MessagesRequest, {"system": [_PART] * _MANY}),
    (ResponsesRequest, {"input": [{"role": "user", "content": "x", **_ODD}] * _MANY}),
    (
        ResponsesRequest,
        {"input": [{"type": "reasoning", "summary": [{**_PART, "type": "summary_text"}] * _MANY}]},
    ),
]


@pytest.mark.parametrize("refuses_unknown", [True, False])
@pytest.mark.parametrize(("kind", "body"), LISTS)
def test_unknown_fields_of_many_objects_become_few_findings(
    kind: type[reading.Body], body: dict[str, Any], refuses_unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    to_violations = reading.to_violations
    monkeypatch.setattr(
        reading, "to_violations", lambda details: found.append(len(details)) or to_violations(details)
    )
    violations, _ = reading.read_body(
        json.dumps(body).encode(), kind, lambda read: read.violations, refuses_unknown=refuses_unknown
    )
    assert bool(violations) is refuses_unknown
    assert max(found, default=0) <= len(_ODD)
