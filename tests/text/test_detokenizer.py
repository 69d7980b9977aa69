"""Pieces of text, joined, are the text of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.tokenizers_of_tests import (
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
)
from triptych.text.detokenizer import create_detokenizer
from triptych.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

FAMILIES = {"bytes": byte_level, "sentencepiece": sentencepiece}
BYTE_IDS = range(3, 259)  # of the SentencePiece tokenizer


def in_pieces(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int], *, skip: bool) -> str:
    """Push in runs of these sizes (the last one repeated), then flush."""
    detokenizer = create_detokenizer(tokenizer, skip_special_tokens=skip)
    text, start = "", 0
    for size in [*sizes, *[sizes[-1]] * len(token_ids)]:
        text += detokenizer.push(token_ids[start : start + size])
        start += size
    return text + detokenizer.flush()


runs = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=50), runs, st.booleans())
def test_any_text_comes_out_whole(text: str, sizes: list[int], skip: bool) -> None:
    for family, backend in ((byte_level, byte_level_backend), (sentencepiece, sentencepiece_backend)):
        token_ids = family().encode(text)
        expected = backend().decode(token_ids, skip_special_tokens=skip)
        assert (
            in_pieces(family(), token_ids, sizes, skip=skip)
            == family().decode(token_ids, skip_special_tokens=skip)
            == expected
        )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49_300) | st.integers(0, 300), max_size=40), runs, st.booleans())
def test_any_byte_level_ids_come_out_as_the_library_decodes_them(
    token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    expected = byte_level_backend().decode(token_ids, skip_special_tokens=skip)
    assert in_pieces(byte_level(), token_ids, sizes, skip=skip) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 310) | st.sampled_from(BYTE_IDS), max_size=40), runs, st.booleans())
def test_any_sentencepiece_ids_come_out_as_decoded_at_once(
    token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    expected = sentencepiece().decode(token_ids, skip_special_tokens=skip)
    assert in_pieces(sentencepiece(), token_ids, sizes, skip=skip) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_over_several_tokens_comes_out_with_its_last_one(family: str) -> None:
    tokenizer = FAMILIES[family]()
    token_ids = tokenizer.encode("x🦊y", add_special_tokens=False)
    detokenizer = create_detokenizer(tokenizer)
    pieces = detokenizer.pieces(token_ids)
    assert len(pieces) == len(token_ids)
    assert pieces.count("") >= 2
    assert "🦊" in pieces
    assert "\ufffd" not in "".join(pieces)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_character_that_is_never_completed_shows_at_the_end_alone(family: str) -> None:
    tokenizer = FAMILIES[family]()
    token_ids = tokenizer.encode("a🦊", add_special_tokens=False)[:-1]
    detokenizer = create_detokenizer(tokenizer)
    assert detokenizer.push(token_ids) == "a"
    assert detokenizer.flush() == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), st.data())
def test_after_a_prompt_the_output_continues_its_text(text: str, data: st.DataObject) -> None:
    for family in FAMILIES.values():
        tokenizer = family()
        token_ids = tokenizer.encode(text)
        cut = data.draw(st.integers(0, len(token_ids)))
        detokenizer = create_detokenizer(tokenizer, prompt_token_ids=token_ids[:cut])
        output = detokenizer.push(token_ids[cut:]) + detokenizer.flush()
        # The prompt's own text ends before a character that the output completes.
        prompt = create_detokenizer(tokenizer).push(token_ids[:cut])
        assert prompt + output == tokenizer.decode(token_ids)


def test_the_first_space_is_the_tokenizers_own_only_where_a_text_begins() -> None:
    tokenizer = sentencepiece()
    (the,) = tokenizer.encode("the", add_special_tokens=False)
    start = tokenizer.token_id("<s>")
    assert start is not None
    assert create_detokenizer(tokenizer).push([the, the]) == "the the"
    assert create_detokenizer(tokenizer, prompt_token_ids=[start]).push([the, the]) == "the the"
    assert (
        create_detokenizer(tokenizer, prompt_token_ids=[start, the, start, start, start]).push([the])
        == " the"
    )


def test_special_tokens_are_skipped_or_spelled_out() -> None:
    tokenizer = byte_level()
    token_ids = [*tokenizer.encode("Yes."), 2, 2]
    assert create_detokenizer(tokenizer).push(token_ids) == "Yes."
    spelled = create_detokenizer(tokenizer, skip_special_tokens=False).push(token_ids)
    assert spelled == "Yes.<|im_end|><|im_end|>"
