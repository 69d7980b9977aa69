"""How a tokenizer's decoder spells tokens: each token -> the bytes that it stands for."""

from __future__ import annotations

import json
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from triptych.errors import ModelError


class Spelling(Protocol):
    """Text is the bytes of its tokens, joined: what makes it possible to decode token by token."""

    strips_leading_space: bool
    """Whether the first space of a text is the tokenizer's own and is left out of it."""

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token of the vocabulary; any part of a UTF-8 sequence."""
        ...


class ByteLevelSpelling:
    """GPT-2 and after: each byte of a token is one of 256 printable characters."""

    strips_leading_space = False

    def __init__(self) -> None:
        self._character_to_byte = _byte_level_alphabet()

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([self._character_to_byte[character] for character in token])
        except KeyError:  # an added token, which is plain text
            return token.encode()


class ByteFallbackSpelling:
    """SentencePiece: `▁` is a space, `<0x0A>` is a byte, all else is text."""

    def __init__(self, space: str, *, strips_leading_space: bool) -> None:
        self._space = space
        self.strips_leading_space = strips_leading_space

    def bytes_of(self, token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(self._space, " ").encode()


def read_spelling(backend: Backend) -> Spelling:
    """The spelling that the decoder of tokenizer.json describes.

    Raises:
        ModelError: a decoder of another family, whose text is not the sum of its tokens.
    """
    description = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps: list[dict[str, Any]] = description.get("decoders", [description])
    match steps:
        case [{"type": "ByteLevel"}]:
            return ByteLevelSpelling()
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]:
            return ByteFallbackSpelling(space, strips_leading_space=False)
        case [
            {"type": "Replace", "pattern": {"String": space}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]:
            return ByteFallbackSpelling(space, strips_leading_space=True)
    raise ModelError(
        f"decoder: {description} is not supported, only ByteLevel (GPT-2, Llama 3, Qwen) and "
        "Replace, ByteFallback, Fuse and Strip of one leading space (SentencePiece)"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable bytes of Latin-1 are themselves, the others go from U+0100 up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
