"""Tokenizers in files of other kinds cut texts as the libraries that those files are made for."""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer, MistralConfig

from triptych.checkpoint import tokenizer_files
from triptych.checkpoint.tokenizer_files import convert_tokenizer
from triptych.errors import ModelError

CORPUS = [*Path(tokenizer_files.__file__).read_text().splitlines(), "naïve café, 好的 1234 🦊"] * 3
LLAMA = {"tokenizer_class": "LlamaTokenizer"}
texts = st.text(st.sampled_from("abcdehinorst  .,'_\n\té好🦊ﬁ12"), max_size=40)
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def sentencepiece_model(kind: str, *, is_plain: bool) -> bytes:
    """
    Args:
        is_plain: As Llama's: characters and spaces are left as they are.
    """
    model = io.BytesIO()
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=600,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.99,
        num_threads=1,
        minloglevel=2,
        user_defined_symbols=["<mark>"],
        **(plain if is_plain else {}),
    )
    return model.getvalue()


def convert(folder: Path, name: str, data: bytes, **config: Any) -> Tokenizer:
    (folder / name).write_bytes(data)
    return convert_tokenizer(folder / name, config)


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_cuts_texts_as_its_library(kind: str, is_plain: bool, tmp_path: Path) -> None:
    data = sentencepiece_model(kind, is_plain=is_plain)
    library = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = convert(tmp_path, "tokenizer.model", data, **LLAMA)
    older = convert(tmp_path, "tokenizer.model", data, **LLAMA, legacy=True)

    @settings(max_examples=200, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        token_ids = older.encode(text, add_special_tokens=False).ids
        if not (is_plain and text.startswith(" ")):  # which then gets no second one, as in transformers 5
            assert ours.encode(text, add_special_tokens=False).ids == token_ids
        assert token_ids == library.encode(text)
        assert ours.decode(token_ids) == library.decode(token_ids)

    check()
    assert ours.encode("a").ids == [library.bos_id(), *library.encode("a")]
    marked = ours.encode("a<mark>b", add_special_tokens=False).tokens
    assert "<mark>" in marked


def test_the_config_says_what_is_added_and_which_tokens_there_are_beside(tmp_path: Path) -> None:
    data = sentencepiece_model("bpe", is_plain=True)
    added = {"600": {"content": "<|end|>", "special": True}, "601": {"content": "<tool>", "special": False}}
    config = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added}
    ours = convert(tmp_path, "tokenizer.model", data, **config)
    assert ours.encode("a<|end|><tool>").ids[-3:] == [600, 601, ours.token_to_id("</s>")]
    assert ours.encode("a").tokens[0] != "<s>"
    with pytest.raises(ModelError, match=r"'<\|end\|>' is to have the id 700, and has 600"):
        convert(tmp_path, "tokenizer.model", data, **LLAMA, added_tokens_decoder={"700": added["600"]})


def tekken(tokens: list[bytes]) -> bytes:
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    values = {
        "config": {
            "pattern": WORDS,
            "num_vocab_tokens": len(tokens) + 5,
            "default_vocab_size": len(tokens) + 10,
            "default_num_special_tokens": 10,
            "version": "v3",
        },
        "vocab": [{"rank": rank, "token_bytes": spelled(token)} for rank, token in enumerate(tokens)],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(control)],
    }
    return json.dumps(values).encode()


def spelled(token: bytes) -> str:
    return base64.b64encode(token).decode()


@functools.cache
def byte_tokens() -> tuple[bytes, ...]:
    """All bytes, and the pairs of a corpus that are joined most often."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [word.encode() for line in CORPUS for word in regex.findall(WORDS, line)]
    for length in (2, 3, 4, 6):
        counted: dict[bytes, int] = {}
        for word in words:
            for start in range(len(word) - length + 1):
                part = word[start : start + length]
                counted[part] = counted.get(part, 0) + 1
        tokens += sorted(counted, key=lambda part: (-counted[part], part))[:60]
    return tuple(tokens)


def join_by_rank(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte pairs by definition: the pair of the lowest rank is joined, the first of equals."""
    parts = [bytes([byte]) for byte in word]
    if word in ranks:
        return [ranks[word]]
    while True:
        pairs = [
            (ranks.get(a + b, len(ranks)), place) for place, (a, b) in enumerate(itertools.pairwise(parts))
        ]
        if not pairs or min(pairs)[0] == len(ranks):
            return [ranks[part] for part in parts]
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@settings(max_examples=100, deadline=None)
@given(texts)
def test_ranked_byte_pairs_are_joined_by_definition(text: str) -> None:
    ranks = {token: rank for rank, token in enumerate(byte_tokens())}
    expected = [
        10 + token for word in regex.findall(WORDS, text) for token in join_by_rank(word.encode(), ranks)
    ]
    ours = tekken_tokenizer()
    assert ours.encode(text, add_special_tokens=False).ids == expected
    assert ours.decode(expected) == text


@functools.cache
def tekken_tokenizer() -> Tokenizer:
    return tokenizer_files._convert_tekken(tekken(list(byte_tokens())), {})


def test_tekken_has_the_ids_of_transformers(tmp_path: Path) -> None:
    data = tekken(list(byte_tokens()))
    ours = convert(tmp_path, "tekken.json", data)
    MistralConfig(vocab_size=len(byte_tokens()) + 10).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, world", "def f(x):\n    return x", "[INST] naïve 好 [/INST]"):
        token_ids = ours.encode(text).ids
        assert token_ids[0] == ours.token_to_id("<s>")
        assert token_ids[1:] == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "tokenizer.model"])
def test_a_tiktoken_file_is_read_for_classes_that_are_known(name: str, tmp_path: Path) -> None:
    data = b"".join(f"{spelled(token)} {rank}\n".encode() for rank, token in enumerate(byte_tokens()))
    ours = convert(tmp_path, name, data, tokenizer_class="TikTokenTokenizer")
    text = "don't stop 1234567 times, 好的世界Hello"
    token_ids = ours.encode(text).ids
    assert ours.decode(token_ids) == text
    words = [text[start:end] for _, (start, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert words == ["don't", " stop", " ", "123", "456", "7", " times", ",", " ", "好的世界", "Hello"]
    with pytest.raises(
        ModelError, match=r"tokenizer_class: 'Other': how it cuts a text into words is not in"
    ):
        convert(tmp_path, name, data, tokenizer_class="Other")


def test_word_pieces_are_those_of_transformers(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz.,!'"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    pieces += ["the", "##ing", "好"]
    data = "\n".join(pieces).encode()
    ours = convert(tmp_path, "vocab.txt", data, tokenizer_class="BertTokenizer")
    theirs = BertTokenizer(vocab={piece: place for place, piece in enumerate(pieces)})
    for text in ("The thing, sing!", "Éa 好的 x", "", "[MASK] the"):
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    pair = theirs("the", "sing")
    assert (ours.encode("the", "sing").ids, ours.encode("the", "sing").type_ids) == (
        pair["input_ids"],
        pair["token_type_ids"],
    )


@pytest.mark.parametrize(
    ("name", "data", "config", "message"),
    [
        ("tokenizer.model", b"\xff\xff\xff", LLAMA, r"neither a SentencePiece model nor a tiktoken file"),
        ("tokenizer.model", b"", LLAMA, r"0 pieces, expected 1 to"),
        ("tokenizer.model", b"SP", {}, r"tokenizer_class: what no class adds around a text is not known"),
        ("tekken.json", b"{}", {}, r"cannot be used as a tokenizer: 'config'"),
        (
            "tiktoken.model",
            b"YQ== 0\nYg== 3\n",
            {"tokenizer_class": "QWenTokenizer"},
            r"line 2: rank 3, expected 1",
        ),
        ("tiktoken.model", b"?? 0\n", {"tokenizer_class": "QWenTokenizer"}, r"line 1: "),
        ("vocab.txt", b"[PAD]\n", {"tokenizer_class": "BertTokenizer"}, r"cls_token: '\[CLS\]' is no token"),
        (
            "vocab.txt",
            b"[PAD]\n",
            {"tokenizer_class": "EsmTokenizer"},
            r"'EsmTokenizer' is not known to read",
        ),
    ],
)
def test_odd_files_are_refused_by_name(
    name: str, data: bytes, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if data == b"SP":
        data = sentencepiece_model("bpe", is_plain=True)
    with pytest.raises(ModelError, match=message) as caught:
        convert(tmp_path, name, data, **config)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_changed_bytes_end_in_an_error_or_a_tokenizer(tmp_path: Path) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        model = bytearray(sentencepiece_model("unigram", is_plain=False))
        for _ in range(data.draw(st.integers(1, 4))):
            model[data.draw(st.integers(0, len(model) - 1))] = data.draw(st.integers(0, 255))
        try:
            tokenizer = convert(tmp_path, "tokenizer.model", bytes(model), **LLAMA)
        except ModelError:
            return
        tokenizer.encode("a text")

    check()
