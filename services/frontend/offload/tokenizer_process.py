"""Tokenizes long texts in a process of its own, so that they take neither the frontend's lock nor its place on a core.

`limited_child.py` runs it for `LongTextEncoder`. The messages and their answers:

    {"data": a tokenizer.json}                                                       {}    first, once
    {"data": UTF-8, "arguments": those of `Tokenizer.encode` but its text}           {"data": token ids, uint32 each}
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

from triptych.text.tokenizer import Tokenizer


def begin(message: dict[str, Any]) -> tuple[dict[str, bytes], Callable[[dict[str, Any]], dict[str, bytes]]]:
    """Build the tokenizer of the first message, which the frontend has built as well."""
    tokenizer = Tokenizer(Backend.from_str(message["data"].decode()), {})

    def answer(message: dict[str, Any]) -> dict[str, bytes]:
        token_ids = tokenizer.encode(message["data"].decode(), **message["arguments"])
        return {"data": array("I", token_ids).tobytes()}

    return {}, answer
