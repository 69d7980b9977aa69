"""One tokenizer of each family: the embedded model's (bytes), and small SentencePiece ones."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import Tokenizer as Backend

from tests.checkpoint.gguf_files import sentencepiece_vocabulary, tokenizer_metadata
from triptych.checkpoint.gguf.tokenizer import build_tokenizer
from triptych.hub import resolve_model
from triptych.text.tokenizer import Tokenizer

PIECES = [
    ("▁", -1.0),
    ("▁t", -2.0),
    ("he", -3.0),
    ("▁the", -4.0),
    ("in", -5.0),
    ("er", -6.0),
    ("▁a", -7.0),
    ("an", -8.0),
    ("▁an", -9.0),
    ("th", -10.0),
    ("the", -11.0),
    ("▁▁", -12.0),
    ("é", -30.0),
    ("好", -31.0),
    *((letter, -40.0 - index) for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz.")),
]


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model("embedded"))


@functools.cache
def byte_level_backend() -> Backend:
    return Backend.from_file(str(resolve_model("embedded") / "tokenizer.json"))


def sentencepiece_backend(**metadata: Any) -> Backend:
    described = tokenizer_metadata(sentencepiece_vocabulary(PIECES))
    return build_tokenizer(described | {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


@functools.cache
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
