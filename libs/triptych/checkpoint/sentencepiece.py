"""SentencePiece's tokenizers, built from their pieces, as a pipeline of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

from triptych.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "▁"  # SentencePiece's spelling of a space

Prefix = Literal["always", "first", "never"]
"""The stretches of a text between special tokens that get a space before them: all, the first one, none."""


class PieceType(IntEnum):
    """The type of a piece, in .model files as in GGUF's `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Pieces:
    """A SentencePiece model."""

    tokens: Sequence[str]
    """By id, each once."""
    scores: Sequence[float]
    types: Sequence[int]
    """`PieceType` of each."""
    is_unigram: bool = False
    """Whether a text is cut into the likeliest pieces; otherwise the best pair is joined, again and again (BPE)."""
    prefix: Prefix = "always"
    removes_spaces: bool = False
    """Whether spaces around a text, and all but one between words, are left out."""
    characters: bytes = b""
    """The rules by which characters are normalized, compiled by SentencePiece; empty: none are."""


def build_sentencepiece(pieces: Pieces) -> Tokenizer:
    """Return the tokenizer, which adds nothing around a text.

    Raises:
        ModelError: The number of scores or types is not that of the tokens, or a token is listed twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    if not len(pieces.tokens) == len(pieces.scores) == len(pieces.types):
        raise ModelError(
            f"tokenizer: {len(pieces.tokens)} tokens, {len(pieces.scores)} scores and {len(pieces.types)} types"
        )
    tokenizer = Tokenizer(_unigram(pieces) if pieces.is_unigram else _bpe(pieces))
    steps: list[Any] = [normalizers.Precompiled(pieces.characters)] if pieces.characters else []
    if pieces.removes_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(_SPACE)] if pieces.prefix == "always" else []
        steps.append(normalizers.Replace(" ", _SPACE))
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    rules = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.prefix != "never":
        rules.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(rules)
    add_special_pieces(tokenizer, pieces.tokens, pieces.types)
    return tokenizer


def add_special_pieces(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special (skipped in text); user-defined ones are only never split."""
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == PieceType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _bpe(pieces: Pieces) -> Any:
    """Text outside of the pieces becomes byte tokens, where there are any."""
    from tokenizers import models

    vocabulary = {token: token_id for token_id, token in enumerate(pieces.tokens)}
    if len(vocabulary) != len(pieces.tokens):
        raise ModelError(f"tokenizer: {len(pieces.tokens) - len(vocabulary)} tokens are listed twice")
    unknown = _unknown_id(pieces)
    return models.BPE(
        vocabulary,
        _merges_of_scores(vocabulary, pieces),
        unk_token=None if unknown is None else pieces.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )


def _unigram(pieces: Pieces) -> Any:
    from tokenizers import models

    has_bytes = PieceType.BYTE in pieces.types
    scored = list(zip(pieces.tokens, pieces.scores, strict=True))
    return models.Unigram(scored, unk_id=_unknown_id(pieces), byte_fallback=has_bytes)


def _unknown_id(pieces: Pieces) -> int | None:
    return next((place for place, kind in enumerate(pieces.types) if kind == PieceType.UNKNOWN), None)


def _merges_of_scores(vocabulary: dict[str, int], pieces: Pieces) -> list[tuple[str, str]]:
    """The ranked merges that do what SentencePiece does: join the pair that makes the best piece, leftmost first.

    Every split of a piece into two pieces is a merge; pieces of equal score keep their order by id.
    """
    merges = []
    for piece, token_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                rank = -pieces.scores[token_id], token_id
                merges.append((*rank, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
