"""Finds the token ids that make readable text, and those that close what a form opens, by a model's tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ModelError

I64 = NDArray[np.int64]

TOKENIZER_FILE = "tokenizer.json"
_CLOSING = frozenset("\"'}]),")
_SPACES = ("Ġ", "▁")  # how byte-level and sentencepiece vocabularies spell the space before a word


def read_word_ids(directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> I64:
    """Return the ids of tokens that are ASCII letters after a space, or else of tokens that are only ASCII letters.

    Bytes, punctuation and control tokens are left out: any sequence of the rest is plain text.

    Args:
        vocab_size: Upper bound of the ids.
        eos_token_ids: Ids that are left out, whatever their text is.
    Returns:
        [n] ascending, n >= 1.
    Raises:
        ModelError: The file is missing, is not a tokenizer, or holds no such token.
    """
    ordinary = _read_ordinary(directory, vocab_size, eos_token_ids)
    words = [token_id for piece, token_id in ordinary if piece[:1] in _SPACES and _is_word(piece[1:])]
    letters = words or [token_id for piece, token_id in ordinary if _is_word(piece)]
    if not letters:
        raise ModelError(
            f"{directory / TOKENIZER_FILE}: none of {len(ordinary)} tokens is made of ASCII letters; simulate another "
            "model"
        )
    return np.array(sorted(letters), np.int64)


def read_closing_ids(directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> I64:
    """Return the ids of tokens that only have quotes, closing brackets and commas, [n] ascending.

    The arguments and errors are those of `read_word_ids`.
    """
    ordinary = _read_ordinary(directory, vocab_size, eos_token_ids)
    return np.array(sorted(token_id for piece, token_id in ordinary if set(piece) <= _CLOSING), np.int64)


def hash_ids(*ids: I64) -> str:
    """Return the sha256 of some columns of ids in hex: part of a fingerprint."""
    return hashlib.sha256(b"|".join(each.astype("<i8").tobytes() for each in ids)).hexdigest()


def _read_ordinary(directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> list[tuple[str, int]]:
    """Return the tokens that are neither control tokens nor EOS, with their ids."""
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        pieces = _token_to_id(tokenizer["model"]["vocab"])
        left_out = {*eos_token_ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: is no tokenizer with a vocabulary: {error!r}") from error
    return [
        (piece, token_id)
        for piece, token_id in pieces.items()
        if token_id < vocab_size and token_id not in left_out
    ]


def _token_to_id(vocab: object) -> dict[str, int]:
    """Return the id of each piece. BPE and WordPiece list ids; Unigram lists [piece, score], by id."""
    if isinstance(vocab, dict):
        return vocab
    if isinstance(vocab, list):
        return {piece: token_id for token_id, (piece, _) in enumerate(vocab)}
    raise TypeError(f"model.vocab is a {type(vocab).__name__}")


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha()
