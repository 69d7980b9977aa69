"""JSON passes as it is; what a model wrote as JSON becomes some, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.text.json_mending import JsonMender, MalformedCallError, mended_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=4)


def mend(pieces: list[str]) -> tuple[str, str]:
    """Return the JSON of one value, and what is behind it."""
    mender, out, text = JsonMender(), "", "".join(pieces)
    num_read = 0
    for piece in pieces:
        new, count = mender.feed(piece, 0)
        out, num_read = out + new, num_read + count
        if mender.is_complete:
            return out, text[num_read:]
        assert count == len(piece)
    return out + mender.close(), text[num_read:]


@given(OBJECTS, st.sampled_from([None, 0, 3]), st.booleans())
def test_valid_json_passes_unchanged(value: object, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert mend([f"{text} }} x"]) == (text, " } x")
    assert mend(list(text)) == (text, "")


@given(OBJECTS, st.data())
def test_a_cut_object_is_closed_with_what_it_has(value: dict[str, object], data: st.DataObject) -> None:
    text = json.dumps(value)
    cut = mended_object(text[: data.draw(st.integers(1, len(text)))])
    assert list(json.loads(cut)) == list(value)[: len(json.loads(cut))]


@settings(max_examples=400)
@given(
    st.lists(
        st.sampled_from(
            ["{", "}", "[", "]", ":", ",", '"', "'", "\\", "\\u", "00e9", "a", "-", "1.", "5e", "True", "null", " ",
             "\n", "é", "<", "\x00", '"a":', "(", "$"]
        ),
        max_size=25,
    )
)  # fmt: skip
def test_anything_behind_a_brace_becomes_an_object(words: list[str]) -> None:
    pieces = ["{", *words]
    out, rest = mend(pieces)
    assert isinstance(json.loads(out), dict)
    assert mend(list("".join(pieces))) == (out, rest)


@pytest.mark.parametrize("text", ["", "[1]", "x", '"a"', "}"])
def test_what_begins_no_object_is_refused(text: str) -> None:
    with pytest.raises(MalformedCallError):
        mended_object(text)


def test_closers_that_do_not_fit_close_what_is_open() -> None:
    assert mend(['{"a": [1, {"b": 2}} rest']) == ('{"a": [1, {"b": 2}]}', " rest")
    assert mend(['{"a": 1] rest']) == ('{"a": 1}', "] rest")
