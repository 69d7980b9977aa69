"""Drawn and read requests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from triptych.client.load.datasets import (
    Lengths,
    draw_random,
    draw_shared_prefixes,
    read_prompts,
    read_sharegpt,
    take,
)
from triptych.errors import ConfigError


def rng(seed=0):
    return np.random.default_rng(seed)


def test_drawn_prompts_follow_the_seed_and_have_the_lengths():
    requests = draw_random(200, Lengths(20, 0.5), Lengths(7), 50, rng())
    assert requests == draw_random(200, Lengths(20, 0.5), Lengths(7), 50, rng())
    assert requests != draw_random(200, Lengths(20, 0.5), Lengths(7), 50, rng(1))
    lengths = {len(request.prompt) for request in requests}
    assert (min(lengths), max(lengths)) == (10, 30)
    assert {request.max_tokens for request in requests} == {7}
    assert {token for request in requests for token in request.prompt} == set(range(50))
    assert min(Lengths(1, 1.0).draw(100, rng())) == 1


def test_prefixes_are_shared_evenly():
    given = [[number] * 8 for number in range(3)]
    requests = draw_shared_prefixes(30, given, Lengths(5), Lengths(2), 1000, rng())
    prefixes = [tuple(request.prompt[:8]) for request in requests]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10, 10, 10]
    assert prefixes[:10] != sorted(prefixes)[:10]  # in random order
    assert len({tuple(request.prompt) for request in requests}) == 30
    assert {len(request.prompt) for request in requests} == {13}


def test_prompts_are_read_from_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    lines = ["a text", {"prompt": "b", "max_tokens": 4}, {"prompt": [1, 2]}, {"messages": chat}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert [(r.prompt, r.max_tokens) for r in read_prompts(file)] == [
        ("a text", None),
        ("b", 4),
        ([1, 2], None),
        (chat, None),
    ]


def test_sharegpt_gives_first_turns_with_their_answers(tmp_path):
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "x"}]
    file.write_text(
        json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}])
    )
    (request,) = read_sharegpt(file)
    assert (request.prompt, request.max_tokens, request.reference) == ("q", None, "a")


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (read_prompts, '"good"\n{bad\n{"prompt": 3}\n{"prompt": []}\n7\n', ["2: ", "3: ", "4: ", "5: "]),
        (read_prompts, '{"prompt": "a", "max_tokens": 0}', ["1: ", "max_tokens"]),
        (read_prompts, '{"prompt": [1, "a"]}', ["1: "]),
        (read_prompts, "{\n" * 9, ["1: ", "5: ", "and 4 more"]),
        (read_sharegpt, "{", ["is no JSON"]),
        (read_sharegpt, "{}", ["expected a list"]),
        (read_sharegpt, '[{"conversations": [1, 2]}, 3]', ["0: ", "1: "]),
    ],
)
def test_bad_entries_are_all_named(tmp_path, read, text, told):
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert all(part in str(caught.value) for part in told)


def test_a_file_too_short_says_so(tmp_path):
    file = tmp_path / "data"
    file.write_text("\n".join(json.dumps(str(number)) for number in range(10)))
    requests = read_prompts(file)
    taken = take(requests, 10, file, rng())
    assert sorted(r.prompt for r in taken) == sorted(r.prompt for r in requests)
    assert taken != requests
    with pytest.raises(ConfigError, match="holds 10 requests, 11 are needed"):
        take(requests, 11, file, rng())
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none")
