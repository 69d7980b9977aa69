"""Prompts in all their forms: which are one and which many, and what is said of those that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from triptych.client.prompts import ParsedPrompt, parse_conversations, parse_prompts
from triptych.errors import InvalidRequest

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("one", 1),
        ([1, 2, 3], 1),
        (list(np.arange(3)), 1),
        (HELLO, 1),
        ([], 0),
        (["one", "two"], 2),
        ([[1, 2], [3]], 2),
        ([[]], 1),
        ([HELLO, HELLO], 2),
        (["one", [1], HELLO], 3),
        (("one", "two"), 2),
        ((1, 2, 3), 1),
        (np.arange(3), 1),
        (np.array([[1, 2], [3, 4]], np.uint32), 2),
        ([np.arange(3), torch.arange(2)], 2),
        ((text for text in ("one", "two")), 2),
        (iter([[1], [2]]), 2),
        (range(3), 1),
        ({"prompt": "one"}, 1),
        ({"prompt_token_ids": [1, 2]}, 1),
        ([{"prompt": "one"}, {"prompt_token_ids": np.arange(2)}, "three"], 3),
    ],
)
def test_one_prompt_and_many_are_told_apart(given, count):
    assert len(parse_prompts(given)) == count


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (3, "prompts"),
        (b"bytes", "prompts"),
        (["one", 2.5], r"prompts\[1\]"),
        ([1, "two"], "prompt"),
        ([[1, 2], [3, None]], r"prompts\[1\]"),
        ([{"role": "user"}], r"prompt.messages\[0\]"),
        ([[{"role": "user", "content": 5}]], r"prompts\[0\].messages\[0\].content"),
        ([{"role": "user", "content": "x", "tool_calls": "y"}], r"prompt.messages\[0\].tool_calls"),
        ({"prompt": 5}, "prompt.prompt"),
        ({"prompt_token_ids": "text"}, "prompt.prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt.prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "prompt.multi_modal_data"),
        ({"prompt": "a", "cache_salt": 1}, "prompt.cache_salt"),
        ([{"cache_salt": "a", "prompt": None}, {"prompt": "a"}], r"prompts\[0\]"),
        (["a", {"cache_salt": "a"}], r"prompts\[1\]"),
        (np.array([0.5]), r"prompts\[0\]"),
        ([None, "a", 3], r"prompts\[0\]: .*; prompts\[2\]"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(given, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        parse_prompts(given)


def test_a_long_wrong_argument_is_shown_by_its_beginning():
    with pytest.raises(InvalidRequest) as caught:
        parse_prompts([["a", 1] * 10_000])
    assert len(str(caught.value)) < 500


def test_chat_refuses_what_is_no_conversation():
    assert len(parse_conversations([HELLO, HELLO])) == 2
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        parse_conversations([HELLO, "hello"])


def test_dictionaries_keep_text_and_salt() -> None:
    given: Any = [
        {"prompt": "one"},
        {"prompt": "two", "prompt_token_ids": [1, 2], "cache_salt": "s"},
        {"prompt_token_ids": np.array([3]), "multi_modal_data": None},
    ]
    assert parse_prompts(given) == [
        ParsedPrompt("one", "one"),
        ParsedPrompt([1, 2], "two", "s"),
        ParsedPrompt([3]),
    ]


def test_only_the_first_of_many_violations_are_told() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_prompts([None] * 10_000)  # type: ignore[list-item]
    assert len(caught.value.violations) == 10
