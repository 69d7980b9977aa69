"""Text and token ids, there and back, as transformers does it."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.helpers.byte_tokenizer import BOS, EOS, byte_backend, byte_tokenizer
from tests.text.tokenizers_of_tests import (
    byte_level,
    byte_level_backend,
    sentencepiece,
    sentencepiece_backend,
)
from triptych.errors import ModelError
from triptych.hub import resolve_model
from triptych.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

SPECIAL_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "line\n\nbreaks\r\n\ttabs",
    "naïve café №5 — “quotes”",
    "你好，世界。こんにちは",
    "👩‍👩‍👧‍👦🇫🇷 flags",
    "1234567 0.5e-3",
    "<|im_start|>user\nHi<|im_end|>\n",
    "\x00\x7f",
    "e\u0301" * 9,
]


@functools.cache
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(resolve_model("embedded"))


def assert_same(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert ids == oracle()(text)["input_ids"]
    assert tokenizer.decode(ids) == oracle().decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == oracle().decode(ids)


@pytest.mark.parametrize("text", SPECIAL_TEXTS)
def test_texts_with_traps_are_as_in_transformers(text: str) -> None:
    assert_same(text)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_as_in_transformers(text: str) -> None:
    assert_same(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49_300), max_size=30), st.booleans())
def test_any_byte_level_ids_decode_as_in_the_library(token_ids: list[int], skip: bool) -> None:
    assert byte_level().decode(token_ids, skip_special_tokens=skip) == byte_level_backend().decode(
        token_ids, skip_special_tokens=skip
    )


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_any_text_through_sentencepiece_decodes_as_in_the_library(text: str, skip: bool) -> None:
    token_ids = sentencepiece().encode(text)
    assert sentencepiece().decode(token_ids, skip_special_tokens=skip) == sentencepiece_backend().decode(
        token_ids, skip_special_tokens=skip
    )


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    tokenizer = sentencepiece()
    euro = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert None not in euro
    assert tokenizer.decode(euro) == "€"
    assert tokenizer.decode(euro[:2]) == "\ufffd"
    assert tokenizer.decode([*euro, *euro[1:]]) == "€\ufffd\ufffd"  # the library would drop the good one too


def test_special_tokens_are_known_and_their_texts_too() -> None:
    tokenizer = byte_level()
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.token_id("no such token") is None


def test_one_token_has_bytes() -> None:
    tokenizer = byte_level()
    (world,) = tokenizer.encode(" world")
    assert tokenizer.token_bytes(world) == b" world"
    part = tokenizer.encode("🦊")[0]
    assert "🦊".encode().startswith(tokenizer.token_bytes(part))
    assert tokenizer.token_bytes(10**6) == b""
    the = sentencepiece().encode("the", add_special_tokens=False)[0]
    assert sentencepiece().token_bytes(the) == b" the"


def test_the_post_processor_adds_the_start_token_unless_told_not_to() -> None:
    tokenizer = sentencepiece()
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [tokenizer.token_id("<s>"), *plain]
    assert byte_level().encode("the") == byte_level().encode("the", add_special_tokens=False)


def test_truncation_and_padding_of_the_training_do_not_count() -> None:
    backend = sentencepiece_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    assert Tokenizer(backend, {}).encode("the the the the") == sentencepiece().encode("the the the the")


class TestDirectory:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        shutil.copy(resolve_model("embedded") / "tokenizer.json", tmp_path)
        return tmp_path

    def test_a_tokenizer_alone_has_no_template_and_no_named_tokens(self, directory: Path) -> None:
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer.chat_template is None
        assert tokenizer.eos_token is None

    @pytest.mark.parametrize(
        "template",
        ["{{ x }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ x }}"}]],
    )
    def test_special_tokens_and_templates_come_in_two_forms(self, directory: Path, template: object) -> None:
        config = {
            "eos_token": {"content": "<|im_end|>", "special": True},
            "bos_token": None,
            "chat_template": template,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.bos_token is None
        assert tokenizer.chat_template == "{{ x }}"

    def test_a_template_in_its_own_file_comes_first(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
        (directory / "chat_template.jinja").write_text("new")
        assert Tokenizer.from_directory(directory).chat_template == "new"

    def test_a_missing_or_broken_file_is_named(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read as JSON"):
            Tokenizer.from_directory(directory)
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
            Tokenizer.from_directory(directory)
        (directory / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
            Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("decoder", "token", "shown"),
    [
        (decoders.WordPiece(), "##ing", b"ing"),
        (decoders.WordPiece(), "sing", b" sing"),
        (decoders.Metaspace(), "\u2581sing", b" sing"),
        (decoders.Metaspace(), "ing", b"ing"),
        (decoders.BPEDecoder(), "sing</w>", b" sing"),
        (decoders.BPEDecoder(), "sing", b"sing"),
        (None, "sing", b" sing"),
    ],
)
def test_a_token_is_shown_as_its_decoder_makes_it(decoder: object, token: str, shown: bytes) -> None:
    backend = Backend(models.WordLevel({token: 0}, token))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, {})
    assert not tokenizer.is_exact
    assert tokenizer.token_bytes(0) == shown
    assert byte_tokenizer().is_exact


@pytest.mark.parametrize("max_tokens", [None, 4, 5, 8, 9, 12, 13, 30])
def test_pairs_are_joined_and_cut_as_the_library_does(max_tokens: int | None) -> None:
    words = ["[CLS]", "[SEP]", *(f"w{number}" for number in range(20))]
    backend = Backend(models.WordLevel({word: place for place, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    backend.decoder = decoders.WordPiece()
    library = Backend.from_str(backend.to_str())
    tokenizer = Tokenizer(backend, {})
    if max_tokens is not None:
        library.enable_truncation(max_tokens, strategy="longest_first")
    for lens in ((1, 9), (9, 1), (5, 5), (4, 6), (6, 4), (1, 1), (10, 3)):
        first, second = (" ".join(words[2 : 2 + length]) for length in lens)
        expected = library.encode(first, second).ids
        assert tokenizer.encode_pair(first, second, max_tokens=max_tokens) == expected, lens


# The end of a text, and how long a token can be


def with_bos_and_eos() -> Tokenizer:
    backend = byte_backend()
    bos, eos = (backend.token_to_id(token) for token in (BOS, EOS))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, bos), (EOS, eos)]
    )
    return Tokenizer(backend, {})


def test_a_truncated_text_keeps_what_is_added_around_it() -> None:
    tokenizer = with_bos_and_eos()
    bos, *inner, eos = tokenizer.encode("Hello world, the end")
    assert tokenizer.encode("Hello world, the end", max_tokens=5) == [bos, *inner[-3:], eos]
    assert tokenizer.encode("Hello world, the end", max_tokens=100) == [bos, *inner, eos]
    assert tokenizer.encode("Hello world, the end", max_tokens=2) == [bos, eos]
    assert tokenizer.encode("Hello world, the end", max_tokens=1) == [eos]
    assert tokenizer.encode("Hello world, the end", max_tokens=5, add_special_tokens=False) == inner[-5:]


@settings(deadline=None)
@given(st.text())
def test_no_token_stands_for_more_characters_than_the_bound(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.max_chars_per_token is not None
    assert len(tokenizer.encode(text)) * tokenizer.max_chars_per_token >= len(text)


@pytest.mark.parametrize(
    ("normalizer", "is_bounded"),
    [
        (None, True),
        (normalizers.NFC(), True),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), True),
        (normalizers.Strip(), False),
        (normalizers.Replace(Regex(" +"), " "), False),
    ],
)
def test_a_normalizer_that_leaves_text_out_takes_the_bound_away(normalizer: object, is_bounded: bool) -> None:
    backend = byte_backend()
    if normalizer is not None:
        backend.normalizer = normalizer
    assert (Tokenizer(backend, {}).max_chars_per_token is not None) == is_bounded


def test_an_added_token_that_takes_spaces_along_takes_the_bound_away() -> None:
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("<x>", rstrip=True)])
    assert Tokenizer(backend, {}).max_chars_per_token is None


def test_unknown_letters_that_become_one_token_take_the_bound_away() -> None:
    unknown = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)
    fallback = {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    bytes_left_out = models.BPE(
        {"<unk>": 0} | fallback, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    words = models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)
    assert Tokenizer(Backend(bytes_left_out), {}).max_chars_per_token == 6
    for model in (unknown, words):
        tokenizer = Tokenizer(Backend(model), {})
        assert len(tokenizer.encode("好" * 100)) == 1
        assert tokenizer.max_chars_per_token is None
