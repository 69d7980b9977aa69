"""JSON of log-probabilities, made from columns and kept pieces, beside objects built one by one."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from triptych.types.events import PromptLogprobsEvent
from triptych.types.logprobs import LogprobRows, TokenLogprobs
from triptych.types.step import PromptLogprobs
from triptych_services.frontend.http.openai import logprobs as module
from triptych_services.frontend.http.openai.logprobs import (
    LOWEST_LOGPROB,
    EchoLogprobs,
    TextPlaces,
    chat_json,
    completion_json,
)

PIECES = [
    b"a",
    b" b",
    "ü".encode(),
    "ü".encode()[:1],
    "\u2028".encode(),
    b'"\\',
    b"\x00",
    b"",
    "🦊".encode()[:3],
]


def some_rows(num_rows: int, width: int, seed: int = 0, *, is_named: bool = False) -> LogprobRows:
    """Return rows whose chosen token is among the best ones where its rank says so."""
    random = np.random.default_rng(seed)
    token_ids = np.array([random.permutation(len(PIECES))[:width] for _ in range(num_rows)], np.uint32)
    logprobs = -np.sort(random.exponential(3, (num_rows, width)).astype(np.float32), axis=1)
    ranks = random.integers(1, width + 2, num_rows)
    for row, rank in enumerate(ranks):
        if width > 1 and rank < width:
            token_ids[row, 0], logprobs[row, 0] = token_ids[row, rank], logprobs[row, rank]
    logprobs[0, -1] = -np.inf
    columns = token_ids.ravel().tolist(), logprobs.ravel(), ranks.tolist()
    return LogprobRows(width, *columns, PIECES.__getitem__, is_named=is_named)


def name_of(token_id: int, token_bytes: bytes, *, names_by_id: bool, is_chat: bool) -> str:
    if names_by_id:
        return f"token_id:{token_id}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return token_bytes.decode(errors="replace") if is_chat else "bytes:" + repr(token_bytes)[2:-1]


def value(logprob: float) -> Any:
    return pytest.approx(max(logprob, LOWEST_LOGPROB), rel=1e-7)


def chat_entry(row: TokenLogprobs, *, names_by_id: bool) -> dict[str, Any]:
    chosen, *top = [
        {
            "token": name_of(token_id, token_bytes, names_by_id=names_by_id, is_chat=True),
            "logprob": value(logprob),
            "bytes": list(token_bytes),
        }
        for token_id, logprob, token_bytes in zip(row.token_ids, row.logprobs, row.token_bytes, strict=True)
    ]
    return {**chosen, "top_logprobs": top}


@pytest.mark.parametrize("names_by_id", [False, True])
@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_chat_json_says_what_each_token_says(num_rows: int, width: int, names_by_id: bool) -> None:
    rows = some_rows(num_rows, width)
    expected = [chat_entry(row, names_by_id=names_by_id) for row in rows]
    assert json.loads(chat_json(rows, names_by_id=names_by_id)) == {"content": expected, "refusal": None}
    assert chat_json(tuple(rows), names_by_id=names_by_id) == chat_json(rows, names_by_id=names_by_id)


@pytest.mark.parametrize("names_by_id", [False, True])
@pytest.mark.parametrize("width", [1, 2, 6])
def test_completion_json_says_what_each_token_says(width: int, names_by_id: bool) -> None:
    rows, places = some_rows(5, width, 1), TextPlaces()
    text = completion_json(rows, places, None, "", names_by_id=names_by_id)
    names = [
        [
            name_of(*candidate, names_by_id=names_by_id, is_chat=False)
            for candidate in zip(row.token_ids, row.token_bytes, strict=True)
        ]
        for row in rows
    ]
    output = [row.token_bytes[0] for row in rows]
    assert places.end == len(codecs.utf_8_decode(b"".join(output), "replace", False)[0])
    assert json.loads(text, object_pairs_hook=_no_name_twice) == {
        "tokens": [own[0] for own in names],
        "token_logprobs": [value(row.logprobs[0]) for row in rows],
        "top_logprobs": [
            dict(zip(own, map(value, row.logprobs), strict=True))
            for own, row in zip(names, rows, strict=True)
        ],
        "text_offset": places_of(output),
    }


@pytest.mark.parametrize("num_together", [1, 2, 5])
def test_places_count_a_character_of_several_tokens_once(num_together: int) -> None:
    fox = "🦊".encode()
    pieces = [" ü".encode(), fox[:3], fox[3:], b"!", b"?"]
    rows = LogprobRows(1, list(range(5)), np.zeros(5, np.float32), [1] * 5, pieces.__getitem__)
    places, offsets = TextPlaces(), list[int]()
    for start in range(0, 5, num_together):
        part = completion_json(rows[start : start + num_together], places, None, "", names_by_id=False)
        offsets += json.loads(part)["text_offset"]
    assert offsets == [0, 2, 2, 3, 4]
    assert [" ü🦊!?"[place] for place in offsets] == [" ", "🦊", "🦊", "!", "?"]


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_token_behind_what_becomes_no_character_is_behind_its_replacement(num_tokens: int) -> None:
    parts = [b"a", "ü".encode(), b"\xf0\x9f", b"\xa6\x8a", b"\xe0", b"\x9f", b"\xef\xbf", b"\xbd?"]
    for tokens in itertools.product(parts, repeat=num_tokens):
        places, echo = TextPlaces(), EchoLogprobs(0, tokens[0])
        echo.add(prompt_part(tokens[1:]))
        expected = places_of(tokens)
        assert [places.add(0, token) for token in tokens] == expected, tokens
        assert echo.place_in(b"".join(tokens).decode(errors="replace"))[0] == expected, tokens


def test_a_token_that_the_text_leaves_out_takes_no_place_in_it() -> None:
    pieces = [b"Yes", b"<|end|>", b"\n", b"No"]
    rows = LogprobRows(1, [0, 1, 2, 1, 3], np.zeros(5, np.float32), [1] * 5, pieces.__getitem__)
    part = completion_json(rows, TextPlaces({1}), None, "", names_by_id=False)
    assert json.loads(part)["text_offset"] == [0, 3, 3, 4, 4]


def prompt_part(tokens: Sequence[bytes]) -> PromptLogprobsEvent:
    """Return the part of a prompt behind its first token."""
    shape = len(tokens), 1
    columns = np.zeros(shape, np.uint32), np.zeros(shape, np.float32), np.ones(len(tokens), np.uint32)
    return PromptLogprobsEvent(PromptLogprobs(1, *columns), tokens)


def places_of(tokens: Sequence[bytes]) -> list[int]:
    """Return the character of all tokens' text that holds the first byte of each."""
    sizes = list[int]()  # bytes of each character
    for character in b"".join(tokens).decode(errors=_WRONG_BYTES):
        num_wrong = ord(character) - ord(_WRONG[0])
        sizes.append(num_wrong if 0 < num_wrong < 4 else len(character.encode()))
    characters = [index for index, size in enumerate(sizes) for _ in range(size)]
    starts = itertools.accumulate(map(len, tokens[:-1]), initial=0)
    return [characters[start] for start in starts]


_WRONG_BYTES = "number of wrong bytes"
_WRONG = "\ue000\ue001\ue002\ue003"
"""By their number, what stands for bytes that are no character together."""
codecs.register_error(_WRONG_BYTES, lambda error: (_WRONG[error.end - error.start], error.end))  # type: ignore[attr-defined]


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_no_tokens_are_empty_lists() -> None:
    assert json.loads(chat_json((), names_by_id=False)) == {"content": [], "refusal": None}
    lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert json.loads(completion_json((), TextPlaces(), None, "", names_by_id=False)) == lists


def test_pieces_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PIECES", 4)
    pieces = module._Pieces(lambda token_bytes: token_bytes + b"!")
    assert [pieces[bytes([byte])] for byte in range(50)] == [bytes([byte]) + b"!" for byte in range(50)]
    assert len(pieces) <= 4


def test_digits_are_those_of_a_float32() -> None:
    rows = LogprobRows(1, [0], np.array([-0.1], np.float32), [1], PIECES.__getitem__)
    assert '"logprob":-0.1,' in chat_json(rows, names_by_id=False)
