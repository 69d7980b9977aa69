"""Each tokenizer class of transformers, trained on a page: texts and tokens are what transformers makes of them."""

from __future__ import annotations

import functools
import inspect
import tempfile
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from triptych.text.detokenizer import create_detokenizer
from triptych.text.tokenizer import Tokenizer

OTHERS = {
    "CLIPTokenizer": "writes another text than its decoder",
    "LasrTokenizer": "of sounds: merges equal tokens",
    "SeamlessM4TTokenizer": "adds the code of a language outside of its file",
    "LayoutLMv2Tokenizer": "wants words and boxes",
    "LayoutLMv3Tokenizer": "wants words and boxes",
    "LayoutXLMTokenizer": "wants words and boxes",
    "UdopTokenizer": "wants words and boxes",
    "RoFormerTokenizer": "wants another package",
}
"""Classes that are no tokenizers of texts alone -> why."""
TEXTS = (
    "Hello, world! Don't stop.",
    "  two  spaces\nand\ttabs ",
    "Größe, naïve café",
    "好的 世界 🦊 fox",
    "a.b, c ; 'quoted' \"x\" 1234567 3.14",
    "Ünïcödé \u200d zero",
    "",
    "x" * 50,
)
CORPUS = [*inspect.getsource(inspect).splitlines()[:400], *TEXTS]
QUICK = ("T5Tokenizer", "BertTokenizer", "OpenAIGPTTokenizer")


def trainable_classes() -> list[str]:
    """Return the names of the classes that make a tokenizer without a file."""
    names = sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name} - set(OTHERS))
    found = []
    for name in names:
        kind = getattr(transformers, name, None)
        if not (inspect.isclass(kind) and issubclass(kind, PreTrainedTokenizerFast)):
            continue
        needed = list(inspect.signature(kind.__init__).parameters.values())[1:]
        if all(
            each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
            for each in needed
        ):
            found.append(name)
    return found


@functools.cache
def trained(name: str) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    theirs = getattr(transformers, name)().train_new_from_iterator(CORPUS, 600)
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        return theirs, Tokenizer.from_directory(Path(directory))


def check(name: str) -> None:
    theirs, ours = trained(name)
    for text in TEXTS:
        token_ids = ours.encode(text)
        assert token_ids == theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(token_ids, skip_special_tokens=skip) == expected
            detokenizer = create_detokenizer(ours, skip_special_tokens=skip)
            assert "".join(detokenizer.pieces(token_ids)) + detokenizer.flush() == expected


@pytest.mark.parametrize("name", QUICK)
def test_a_class_of_each_other_decoder_gives_the_librarys_texts(name: str) -> None:
    assert not trained(name)[1].is_exact
    check(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", trainable_classes())
def test_every_class_gives_the_librarys_texts(name: str) -> None:
    try:
        trained(name)
    except ValueError as error:  # Pegasus and the class of all others, which need a file
        pytest.skip(f"{name} is not made without a file: {error}")
    check(name)


@pytest.mark.thorough
def test_forty_classes_are_tried() -> None:
    assert len(trainable_classes()) >= 40


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from("ab cd'.,!é好\n"), max_size=30), data=st.data())
def test_after_a_prompt_the_output_continues_its_text(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = trained(name)[1]
    token_ids = [token_id for token_id in tokenizer.encode(text) if token_id not in tokenizer.special_ids]
    cut = data.draw(st.integers(0, len(token_ids)))
    detokenizer = create_detokenizer(tokenizer, prompt_token_ids=token_ids[:cut])
    output = detokenizer.push(token_ids[cut:]) + detokenizer.flush()
    prompt = create_detokenizer(tokenizer).push(token_ids[:cut])
    assert prompt + output == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", QUICK)
def test_tokens_are_counted_from_a_state(name: str) -> None:
    tokenizer = trained(name)[1]
    token_ids = tokenizer.encode("Hello, world! Don't stop.", add_special_tokens=False)
    detokenizer = create_detokenizer(tokenizer)
    detokenizer.push(token_ids[:2])
    state = detokenizer.state
    pieces = detokenizer.pieces(token_ids[2:])
    assert detokenizer.count_tokens(state, token_ids[2:], sum(map(len, pieces[:3]))) == 3
    assert detokenizer.count_tokens(state, token_ids[2:], sum(map(len, pieces)) + 1) == len(pieces) + 1
    rest = tokenizer.encode(" more", add_special_tokens=False)
    assert tokenizer.decode([*token_ids, *rest]).endswith(detokenizer.push(rest))


def test_bytes_that_never_become_a_character_cost_no_more_and_more() -> None:
    """An output may be forced to such bytes for all of its length."""
    backend = Backend(models.BPE({"<0xE5>": 0, "a": 1}, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, {})
    assert not tokenizer.is_exact
    detokenizer = create_detokenizer(tokenizer)
    text = detokenizer.push([0] * 300)
    assert len(detokenizer.state[0]) <= 16
    text += detokenizer.push([1]) + detokenizer.flush()
    assert text.strip("\ufffd") == "a"
    assert text.count("\ufffd") == 300
