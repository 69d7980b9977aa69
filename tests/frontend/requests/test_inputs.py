"""Inputs of a call in columns, as one process hands them to another."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import pytest

from triptych.types.pooling import PoolingParams, Task
from triptych.types.submit import RequestHead
from triptych_services.frontend.requests.inputs import Passages, PooledCall
from triptych_services.frontend.requests.raw import RawChat, RawRequest
from triptych_services.frontend.requests.sampling import pack_ids

PROMPTS: list[Any] = [
    "Hello", "", "世界 \ud800", array("I", [5, 1 << 31]), array("I"), None, RawChat([{"role": "user"}]), "end",
]  # fmt: skip


def call(prompts: Any, request_id: str = "mine") -> PooledCall:
    base = RawRequest(
        api="grpc",
        prompt=None,
        head=RequestHead(request_id),
        pooling=PoolingParams(Task.EMBED),
        paths={"tenant": "user"},
    )
    changes = {3: {"add_special_tokens": False, "paths": {"tools": "chat.tools"}}}
    return PooledCall(base, prompts, [f"inputs[{place}]" for place in range(len(prompts))], changes)


def test_inputs_are_the_same_in_another_process() -> None:
    before = call(PROMPTS)
    after = pickle.loads(pickle.dumps(before))
    assert len(after) == len(PROMPTS)
    for place, prompt in enumerate(PROMPTS):
        assert after[place] == before[place]
        assert after[place].prompt == prompt
        assert after[place].head.request_id == f"mine-{place}"
        assert after[place].path("prompt") == f"inputs[{place}]"
    assert (after[3].add_special_tokens, after[2].add_special_tokens) == (False, None)
    assert (after[3].path("tools"), after[2].path("tools"), after[3].path("tenant")) == (
        "chat.tools",
        "tools",
        "user",
    )
    with pytest.raises(IndexError):
        after.prompts[len(PROMPTS)]


def test_one_input_has_the_name_of_its_call() -> None:
    assert call(["x"])[0].head.request_id == "mine"
    assert call(["x", "y"], request_id="")[1].head.request_id == ""


def test_thousands_of_inputs_are_few_objects() -> None:
    one, many = (pickle.dumps(call([f"text {place}" for place in range(count)])) for count in (1, 2048))
    most = 2048 * (
        len("text 2047") + len("inputs[2047]") + 8 + 4
    )  # with its end, and what pickle adds to a path
    assert len(many) - len(one) < most


def test_passages_are_the_same_in_another_process() -> None:
    for passages in (Passages(["a", "世"], "documents"), Passages(["q"], "query", is_list=False)):
        after = pickle.loads(pickle.dumps(passages))
        assert [after[place] for place in range(len(after))] == passages.texts
        assert after.path_of(0) == passages.path_of(0)
    assert Passages(["a", "b"], "documents").path_of(1) == "documents[1]"
    assert Passages(["q"], "query", is_list=False).path_of(0) == "query"


@pytest.mark.parametrize(
    ("given", "packed"),
    [
        ([], []),
        ([0, (1 << 32) - 1], [0, (1 << 32) - 1]),
        ([1, -1, 1 << 32], [1, -1, 1 << 32]),
        ([10**400, 3, -(10**400)], [(1 << 63) - 1, 3, -(1 << 63)]),
    ],
)
def test_ids_that_fit_no_word_stay_wrong(given: list[int], packed: list[int]) -> None:
    assert list(pack_ids(given)) == packed
