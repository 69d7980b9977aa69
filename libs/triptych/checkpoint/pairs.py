"""Reads how a tokenizer joins the two texts of a pair, without the tokenizer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triptych.checkpoint.config_file import ConfigFile

_TOKENIZER_FILE = "tokenizer.json"


def read_pair_separator(directory: Path) -> int | None:
    """Return the token before the second text of a pair, where that text has token type 1.

    None: there is no tokenizer.json, or it gives both texts type 0.

    Raises:
        ModelError: The file is no JSON object.
    """
    processor = ConfigFile.read_optional(directory / _TOKENIZER_FILE).values.get("post_processor")
    return _separator(processor) if isinstance(processor, dict) else None


def _separator(processor: dict[str, Any]) -> int | None:
    kind = processor.get("type")
    if kind == "Sequence":
        parts = processor.get("processors")
        found = [
            _separator(part) for part in (parts if isinstance(parts, list) else ()) if isinstance(part, dict)
        ]
        return next((token for token in found if token is not None), None)
    if kind == "BertProcessing":
        separator = processor.get("sep")
        return _token_id(separator[-1]) if isinstance(separator, list) and separator else None
    if kind != "TemplateProcessing":
        return None
    before: str | None = None
    for piece in processor.get("pair") or ():
        if not isinstance(piece, dict):
            return None
        sequence, token = piece.get("Sequence"), piece.get("SpecialToken")
        if isinstance(sequence, dict) and sequence.get("id") == "B":
            special = (processor.get("special_tokens") or {}).get(before)
            ids = special.get("ids") if isinstance(special, dict) else None
            return (
                _token_id(ids[-1]) if sequence.get("type_id") == 1 and isinstance(ids, list) and ids else None
            )
        before = token.get("id") if isinstance(token, dict) else None
    return None


def _token_id(value: object) -> int | None:
    return value if type(value) is int else None
