"""A converted tokenizer splits text as the algorithm that its metadata names, written out naively."""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2 import tokenization_qwen2

from tests.checkpoint.gguf_files import byte_level_vocabulary, sentencepiece_vocabulary, tokenizer_metadata
from tests.text.test_tokenizers_of_families import random_text
from tests.text.tokenizers_of_families import FAMILIES
from tests.text.tokenizers_of_tests import PIECES, sentencepiece_backend
from triptych.checkpoint.gguf.tokenizer import _WORDS, build_tokenizer, write_tokenizer
from triptych.errors import ModelError
from triptych.hub import resolve_model
from triptych.text.tokenizer import Tokenizer as TextTokenizer

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TEXTS = [
    "",
    " ",
    "a",
    "The capital of France is Paris.",
    "  two  spaces\n\n\ttabs \r\n end ",
    "I'll don't we've it's I'M",
    "1234567890 3.14159 1,000 x86_64 v2",
    "naïve café — “quotes” … №5",
    "Привет, мир! שלום עולם مرحبا بالعالم",
    "你好，世界。これは日本語です。한국어도 됩니다",
    "👩‍👩‍👧‍👦🇫🇷👍🏽 emoji",
    "def f(x):\n    return x**2  # ²³ ½ ⅷ ٣",
    "e\u0301 \u00a0\u2003\u200b zero",
    "\x00\x01\x7f control",
    "a" * 300,
    "<|im_start|>user\nHi<|im_end|> and <|not_one|>",
    "\ud7ff\ue000\U0010ffff",
]


def naive_byte_level(
    text: str, cut: str, ranks: dict[tuple[str, str], int], vocabulary: dict[str, int]
) -> list[int]:
    """GPT-2's algorithm as its paper's code has it: cut into words, then merge the best-ranked pair again and again."""
    ids = []
    for word in regex.findall(cut, text):
        symbols = [stand_in for stand_in, _ in zip(to_stand_ins(word), word.encode(), strict=True)]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged, index = [], 0
            while index < len(symbols):
                step = 2 if tuple(symbols[index : index + 2]) == best else 1
                merged.append("".join(symbols[index : index + step]))
                index += step
            symbols = merged
        ids += [vocabulary[symbol] for symbol in symbols]
    return ids


def to_stand_ins(word: str) -> str:
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(
        chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in word.encode()
    )


def naive_sentencepiece(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """SentencePiece's: join the neighbours whose piece scores best, leftmost first; bytes for what is no piece."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[pair], index)
            for index, pair in enumerate(map("".join, itertools.pairwise(symbols)))
            if pair in scores
        ]
        if not joined:
            break
        _, index = min(joined)
        symbols[index : index + 2] = ["".join(symbols[index : index + 2])]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


@pytest.mark.model
def test_the_embedded_tokenizer_cuts_digits_apart_and_merges_by_rank() -> None:
    path = resolve_model("embedded") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    model = json.loads(path.read_text())["model"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
    cut = rf"(?s)\p{{N}}|{GPT2_WORDS}"
    # A digit leaves the words around it in two separate runs, which the alternatives above do not see.
    for text in TEXTS:
        plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        runs = [run for run in regex.split(r"(\p{N})", plain) if run]
        expected = [token for run in runs for token in naive_byte_level(run, cut, ranks, model["vocab"])]
        assert tokenizer.encode(plain).ids == expected, plain


@pytest.mark.model
def test_control_tokens_in_a_text_become_their_ids() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("embedded") / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, *tokenizer.encode("user\n").ids, 2]
    assert [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special][
        :3
    ] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_words_are_cut_as_transformers_cuts_them_for_llama_3_and_qwen_2() -> None:
    llama3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
    for pre, pattern in (("llama-bpe", llama3), ("qwen2", tokenization_qwen2.PRETOKENIZE_REGEX)):
        tokenizer = build_tokenizer(tokenizer_metadata(byte_level_vocabulary([], pre=pre)))
        for text in TEXTS:
            cut = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            assert cut == [to_stand_ins(word) for word in regex.findall(pattern, text)], (pre, text)


@pytest.mark.parametrize("pre", _WORDS)
def test_words_are_cut_one_cut_after_the_other(pre: str) -> None:
    tokenizer = build_tokenizer(tokenizer_metadata(byte_level_vocabulary([], pre=pre)))
    for text in (*TEXTS, "HelloWorld's 12345 çaÉtat 漢字かな 123,456.78 !foo ~bar\r\n\r\n x"):
        pieces = [text]
        for pattern in _WORDS[pre]:
            pieces = [part for piece in pieces for part in cut(piece, pattern)]
        found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert found == [to_stand_ins(piece) for piece in pieces], text
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        composed = text if tokenizer.normalizer is None else unicodedata.normalize("NFC", text)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == composed


def cut(text: str, pattern: str) -> list[str]:
    """The words that a pattern finds, and what is between them."""
    parts, end = [], 0
    for found in regex.finditer(pattern, text, regex.V1):
        parts += [text[end : found.start()], found.group()]
        end = found.end()
    return [part for part in (*parts, text[end:]) if part]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("tekken", ["Hello", "World", "'s", " ", "1", "2", " x"]),
        ("gpt-4o", ["Hello", "World's", " ", "12", " x"]),
        ("deepseek-v3", ["HelloWorld", "'s", " ", "12", " x"]),
        ("qwen35", ["HelloWorld", "'s", " ", "1", "2", " x"]),
        ("glm4", ["HelloWorld", "'s", " ", "12", " x"]),
        ("kimi-k2", ["Hello", "World's", " ", "12", " x"]),
    ],
)
def test_families_differ_in_their_words(pre: str, words: list[str]) -> None:
    tokenizer = build_tokenizer(tokenizer_metadata(byte_level_vocabulary([], pre=pre)))
    found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("HelloWorld's 12 x")]
    assert found == [to_stand_ins(word) for word in words]


def test_digits_of_trinity_are_grouped_from_the_end() -> None:
    tokenizer = build_tokenizer(tokenizer_metadata(byte_level_vocabulary([], pre="afmoe")))
    found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a1234567b 890 中文ひ가x")]
    words = ["a", "1", "234", "567", "b", " ", "890", " ", "中文ひ가", "x"]
    assert found == [to_stand_ins(word) for word in words]


OF_FAMILIES = {
    "gpt2": ("gpt2", "gpt-2"),
    "olmo": ("gpt2", "olmo"),
    "olmo2": ("gpt2", "dbrx"),
    "llama3": ("gpt2", "llama-bpe"),
    "llama4": ("gpt2", "llama4"),
    "qwen2": ("gpt2", "qwen2"),
    "qwen3.5": ("gpt2", "qwen35"),
    "deepseek-v2": ("gpt2", "deepseek-llm"),
    "deepseek-v3": ("gpt2", "deepseek-v3"),
    "gpt-oss": ("gpt2", "gpt-4o"),
    "falcon": ("gpt2", "falcon"),
    "falcon-h1": ("gpt2", "falcon-h1"),
    "starcoder": ("gpt2", "starcoder"),
    "granite": ("gpt2", "refact"),
    "smollm": ("gpt2", "smollm"),
    "bloom": ("gpt2", "bloom"),
    "glm4": ("gpt2", "chatglm-bpe"),
    "command-r": ("gpt2", "command-r"),
    "aya": ("gpt2", "tiny_aya"),
    "minimax-m2": ("gpt2", "minimax-m2"),
    "hunyuan": ("gpt2", "hunyuan-dense"),
    "exaone": ("gpt2", "exaone-moe"),
    "bailing": ("gpt2", "bailingmoe2"),
    "phi2": ("gpt2", "phi-2"),
    "stablelm2": ("gpt2", "stablelm2"),
    "mistral-nemo": ("gpt2", "tekken"),
    "lfm2": ("gpt2", "lfm2"),
    "roberta": ("gpt2", "roberta-bpe"),
    "modernbert": ("gpt2", "modern-bert"),
    "gemma4": ("gemma4", ""),
    "bert-uncased": ("bert", "default"),
    "bert-cased": ("bert", "default"),
    "xlm-roberta": ("t5", "default"),
}
"""Family -> `tokenizer.ggml.model` and `tokenizer.ggml.pre` of llama.cpp's converter."""


def described_by_converter(backend: Tokenizer, model: str, pre: str, folder: Path) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes of a tokenizer.json."""
    backend.save(str(folder / "tokenizer.json"))
    described = json.loads(backend.to_str())
    added = {token["id"]: token for token in described["added_tokens"]}
    names = added_around(described)
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    special = gguf.SpecialVocab(folder, load_merges=described["model"]["type"] == "BPE")
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    kinds = gguf.TokenType
    types = [
        (kinds.CONTROL if added[place]["special"] else kinds.USER_DEFINED)
        if place in added
        else kinds.BYTE
        if re.fullmatch("<0x[0-9A-F]{2}>", token)
        else kinds.NORMAL
        for place, token in enumerate(tokens)
    ]
    values: dict[str, Any] = {"model": model, "pre": pre, "tokens": tokens, "token_type": types}
    if model == "bert":
        values["tokens"] = [
            token if kind == kinds.CONTROL else token[2:] if token.startswith("##") else f"▁{token}"
            for token, kind in zip(tokens, types, strict=True)
        ]
    elif model == "t5":
        types[tokens.index("<unk>")] = kinds.UNKNOWN
        charsmap = base64.b64decode(described["normalizer"]["precompiled_charsmap"])
        values |= {"precompiled_charsmap": list(charsmap), "remove_extra_whitespaces": True}
        scores = dict(described["model"]["vocab"])
        values["scores"] = [scores.get(token, -10000.0) for token in tokens]
    else:
        values["merges"] = special.merges
    values |= {f"add_{name}_token": adds for name, adds in special.add_special_token.items()}
    keys = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
    values |= {f"{keys.get(name, name)}_token_id": each for name, each in special.special_token_ids.items()}
    if model == "bert":
        values["normalizer.lowercase"] = described["normalizer"]["lowercase"]
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def added_around(described: dict[str, Any]) -> dict[str, str]:
    """Return the names of tokens that tokenizer_config.json has beside such a tokenizer.json."""
    parts = described["post_processor"].get("processors", [described["post_processor"]])
    around = [
        part["SpecialToken"]["id"] if "SpecialToken" in part else ""
        for part in next((part["single"] for part in parts if part["type"] == "TemplateProcessing"), ())
    ]
    names = {"bos_token": next(iter(around), ""), "eos_token": next(reversed(around), "")}
    contents = [token["content"] for token in described["added_tokens"]]
    names |= {"unk_token": next((each for each in contents if each.lower().strip("<[]>") == "unk"), "")}
    if "[CLS]" in contents:
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return {name: text for name, text in names.items() if text}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "name", dict.fromkeys(("gemma4", "bert-uncased", "xlm-roberta", "qwen3.5", *OF_FAMILIES))
)
def test_a_converted_tokenizer_has_the_ids_of_its_tokenizer_json(name: str, tmp_path: Path) -> None:
    backend = FAMILIES[name].build()
    model, pre = OF_FAMILIES[name]
    ours = build_tokenizer(described_by_converter(backend, model, pre, tmp_path))
    theirs = TextTokenizer(backend, {})
    spelled = [token.content for token in backend.get_added_tokens_decoder().values() if token.lstrip]
    for _ in range(60):
        text = random_text(theirs)
        if backend.normalizer is not None and ours.normalizer is None:
            text = unicodedata.normalize("NFC", text)  # which llama.cpp does for none
        if model == "t5":
            text = text.replace(
                "\x85", ""
            )  # a line's end to the `tokenizers` library, and none to SentencePiece
        if any(token in text for token in spelled):
            continue  # files do not say that such a token takes the spaces before it along
        found = ours.encode(text)
        assert found.ids == backend.encode(text).ids, repr(text)
        assert ours.decode(found.ids) == backend.decode(found.ids)
    assert ours.encode("a b", "b").ids == backend.encode("a b", "b").ids
    if model == "bert":
        assert ours.encode("a b", "b").type_ids == [0, 0, 0, 0, 1, 1]


def test_a_vocabulary_with_capitals_is_of_a_model_that_keeps_them(tmp_path: Path) -> None:
    for name, expected in (("bert-uncased", ["a", "a"]), ("bert-cased", ["A", "a"])):
        metadata = described_by_converter(FAMILIES[name].build(), "bert", "default", tmp_path)
        del metadata["tokenizer.ggml.normalizer.lowercase"]  # as files of 2024
        assert build_tokenizer(metadata).encode("A a", add_special_tokens=False).tokens == expected


def test_eos_is_added_where_the_file_asks_for_it() -> None:
    metadata = tokenizer_metadata(byte_level_vocabulary([], pre="qwen2"))
    asks = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert build_tokenizer(metadata | asks).encode("a").tokens == ["a", "<|end|>"]
    del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ModelError, match=r"eos_token_id: is missing, but add_eos_token asks for it"):
        build_tokenizer(metadata | asks)


def test_templates_by_name_are_kept(tmp_path: Path) -> None:
    metadata = tokenizer_metadata(byte_level_vocabulary([]))
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    write_tokenizer(metadata | templates, tmp_path)
    tokenizer = TextTokenizer.from_directory(tmp_path)
    assert (tokenizer.chat_template, tokenizer.other_templates) == ("plain", {"tool_use": "tools"})


def test_llama_3_takes_a_whole_word_although_no_merge_leads_there() -> None:
    vocabulary = byte_level_vocabulary(["a b"])
    vocabulary["tokens"] += ["abcd"]
    vocabulary["types"] += [1]
    whole = len(vocabulary["tokens"]) - 1
    for pre, expected in (("llama-bpe", [0, whole]), ("qwen2", None)):
        ids = build_tokenizer(tokenizer_metadata(vocabulary | {"pre": pre})).encode("abcd").ids
        assert (ids == expected) if expected else (whole not in ids)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("thean ir.é好ß\n"), max_size=30))
def test_pieces_are_joined_by_score_as_sentencepiece_joins_them(text: str) -> None:
    vocabulary = sentencepiece_vocabulary(PIECES)
    ids = {token: index for index, token in enumerate(vocabulary["tokens"])}
    expected = naive_sentencepiece(text, dict(PIECES), ids) if text else []
    assert sentencepiece_backend().encode(text).ids == [1, *expected]


def test_the_file_decides_on_the_space_before_a_text_and_on_the_start_token() -> None:
    silent, told = sentencepiece_backend(), sentencepiece_backend(add_space_prefix=False, add_bos_token=False)
    assert silent.encode("the").tokens == ["<s>", "▁the"]
    assert told.encode("the").tokens == ["the"]
    assert silent.decode(silent.encode("the").ids) == "the"
    assert told.decode(told.encode(" the").ids) == " the"


def test_user_defined_tokens_are_never_split_and_never_skipped() -> None:
    tokenizer = build_tokenizer(tokenizer_metadata(byte_level_vocabulary([])))
    ids = tokenizer.encode("a<tool><|end|>").ids
    assert ids[1:] == [2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges: 'ab' is not two tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, r"tokens: 1 tokens are listed twice"),
        (
            {"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True},
            r"bos_token_id: 1000000 is outside",
        ),
        ({"tokenizer.ggml.pre": "default"}, r"pre: 'default' is not supported"),
    ],
)
def test_odd_metadata_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_tokenizer(tokenizer_metadata(byte_level_vocabulary([])) | change)


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges"])
def test_missing_metadata_is_refused_by_name(key: str) -> None:
    metadata = tokenizer_metadata(byte_level_vocabulary([]))
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{key}: is missing"):
        build_tokenizer(metadata)


def test_the_alphabet_of_the_tests_is_that_of_the_library() -> None:
    assert set(to_stand_ins("".join(map(chr, range(128))))) <= set(ByteLevel.alphabet())
