"""Log-probabilities as OpenAI's and vLLM's clients read them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Sequence
from operator import add
from typing import Any

import orjson

from triptych.types.events import PromptLogprobsEvent
from triptych.types.logprobs import LogprobRows, TokenLogprobs
from triptych.types.step import F32

LOWEST_LOGPROB = -9999.0  # represents minus infinity, which JSON lacks; as OpenAI does
_SEARCHED_CHARS = 64
_MAX_PIECES = 1 << 19
"""Pieces of JSON that are kept: more than a vocabulary has tokens, and some 100 bytes each."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can spell."""
    return max(logprob, LOWEST_LOGPROB)


def name_by_text(token_bytes: bytes) -> str:
    """Return the name of a token in OpenAI's completions: its text, or its bytes in OpenAI's spelling.

    Parts of characters differ in their bytes only.
    """
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class _Characters:
    """The characters of tokens, as they come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_bytes: bytes) -> tuple[str, int]:
        """Return the text that the next token completes, and how many characters of it, 0 or 1, are before the token.

        One is where the token shows that the bytes before it will never be a character: that is U+FFFD.
        """
        decode, get_state = self._decoder.decode, self._decoder.getstate
        if not token_bytes or not get_state()[0]:
            return decode(token_bytes), 0
        # A byte that goes on with what has begun completes one character or none, and begins nothing.
        first = decode(token_bytes[:1])
        num_before = len(first) + bool(get_state()[0]) - 1 if first else 0
        return first + decode(token_bytes[1:]), num_before


class TextPlaces:
    """Finds where the tokens of a text begin in it, as they come.

    One that begins inside a character begins where that character does:

        tokens   " "   first bytes of 🦊   last byte of 🦊   "!"   first bytes of 🦊   "?"
        text     " "                  "🦊"                   "!"       U+FFFD         "?"
        place     0            1                 1            2            3           4
    """

    def __init__(self, without_text: Container[int] = ()) -> None:
        """`without_text`: ids of tokens that the text leaves out. They begin where the next one does."""
        self.end = 0
        """Characters of the text so far, without one that is not complete."""
        self._characters = _Characters()
        self._without_text = without_text

    def add(self, token_id: int, token_bytes: bytes) -> int:
        """Take in the next token, and return its place."""
        if token_id in self._without_text:
            return self.end
        text, num_before = self._characters.push(token_bytes)
        place = self.end + num_before
        self.end += len(text)
        return place


class CompletionColumns:
    """The lists of a completion's log-probabilities, each item as JSON."""

    __slots__ = ("token_logprobs", "tokens", "top_logprobs")

    def __init__(self) -> None:
        self.tokens: list[bytes] = []
        self.token_logprobs: list[bytes] = []
        self.top_logprobs: list[bytes] = []

    def add(self, keys: Iterable[bytes], logprobs: F32, num_candidates: int) -> None:
        """Append positions of `num_candidates` each.

        Args:
            keys: Of each candidate, its name as the key of a JSON object.
            logprobs: Of each candidate.
        """
        keys, numbers = list(keys), _numbers(logprobs)
        self.tokens += [key[:-1] for key in keys[::num_candidates]]
        self.token_logprobs += numbers[::num_candidates]
        for start in range(0, len(keys), num_candidates):
            place = slice(start, start + num_candidates)
            entries = dict(
                zip(keys[place], numbers[place], strict=True)
            )  # the chosen one may be among the best
            self.top_logprobs.append(b"{" + b",".join(map(add, entries.keys(), entries.values())) + b"}")


class EchoLogprobs:
    """One prompt's tokens; grows by parts, then is shared by all choices."""

    def __init__(self, first_token_id: int, first_token_bytes: bytes, *, names_by_id: bool = False) -> None:
        self._names_by_id = names_by_id
        self._pieces = [first_token_bytes]
        self.columns = CompletionColumns()
        (key,) = _keys([first_token_id], [first_token_bytes], names_by_id)
        self.columns.tokens.append(key[:-1])
        self.columns.token_logprobs.append(b"null")  # nothing predicts the first token
        self.columns.top_logprobs.append(b"null")

    def add(self, event: PromptLogprobsEvent) -> None:
        """Append the next part."""
        part, num_candidates = event.logprobs, event.logprobs.token_ids.shape[1]
        self._pieces += event.token_bytes[::num_candidates]
        keys = _keys(part.token_ids.ravel().tolist(), event.token_bytes, self._names_by_id)
        self.columns.add(keys, part.logprobs.ravel(), num_candidates)

    def place_in(self, text: str) -> tuple[list[int], int]:
        """Find where each token begins in a text that begins with the prompt; return that, and where the prompt ends.

        A token that the text leaves out, as special ones are, begins where the next one does. One that begins inside a
        character begins where that character does.
        """
        characters = _Characters()
        offsets, offset = [], 0
        for piece, num_before in map(characters.push, self._pieces):
            offsets.append(offset + num_before)
            if not offset and not text.startswith(piece):
                piece = piece.removeprefix(" ")  # some tokenizers put a space before every text
            place = text.find(piece, offset, offset + len(piece) + _SEARCHED_CHARS)  # normalised texts differ
            if place >= 0:
                offset = place + len(piece)
        return offsets, offset


class PromptLogprobsList:
    """One prompt's log-probabilities as vLLM sends them: null, then one object per token, by ids; grows by parts."""

    def __init__(self) -> None:
        self.positions: list[dict[str, dict[str, Any]] | None] = [None]

    def add(self, event: PromptLogprobsEvent) -> None:
        """Append the next part."""
        part = event.logprobs
        texts = iter(event.token_bytes)
        rows = zip(part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist(), strict=True)
        for token_ids, logprobs, own_rank in rows:
            position: dict[str, dict[str, Any]] = {}
            for rank, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
                text = next(texts).decode(errors="replace")
                entry = {"logprob": finite(logprob), "rank": rank or own_rank, "decoded_token": text}
                position.setdefault(str(token_id), entry)  # the prompt's own token may be one of the best
            self.positions.append(position)


def completion_json(
    entries: Sequence[TokenLogprobs],
    places: TextPlaces,
    prompt: EchoLogprobs | None,
    text: str,
    *,
    names_by_id: bool,
) -> str:
    """Return the JSON of new tokens of a completion.

    Args:
        places: Of the tokens of the completion. Takes these in.
        prompt: The prompt, if the text begins with it.
        text: The new text.
    """
    offsets: list[int] = []
    columns = CompletionColumns()
    if prompt is not None:
        offsets, places.end = prompt.place_in(text)
    if entries:
        rows = LogprobRows.of(entries)
        token_bytes, width = rows.token_bytes, rows.num_candidates
        offsets += map(places.add, rows.token_ids[::width], token_bytes[::width])
        columns.add(_keys(rows.token_ids, token_bytes, names_by_id), rows.logprobs, width)
    lists = [
        b",".join([*(getattr(prompt.columns, name) if prompt is not None else ()), *getattr(columns, name)])
        for name in ("tokens", "token_logprobs", "top_logprobs")
    ]
    json = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":%b}'
    return (json % (*lists, orjson.dumps(offsets))).decode()


def chat_json(entries: Sequence[TokenLogprobs], *, names_by_id: bool) -> str:
    """Return the JSON of new tokens of an answer to a conversation."""
    return f'{{"content":{chat_entries_json(entries, names_by_id=names_by_id)},"refusal":null}}'


def chat_entries_json(entries: Sequence[TokenLogprobs], *, names_by_id: bool = False) -> str:
    """Return a JSON array with an object for each new token of an answer to a conversation."""
    if not entries:
        return "[]"
    rows = LogprobRows.of(entries)
    token_bytes, width = rows.token_bytes, rows.num_candidates
    if names_by_id:
        heads = [
            _chat_head(f"token_id:{token_id}", utf8)
            for token_id, utf8 in zip(rows.token_ids, token_bytes, strict=True)
        ]
    else:
        heads = list(map(_CHAT_HEADS.__getitem__, token_bytes))
    open_objects = list(map(add, heads, _numbers(rows.logprobs)))
    end = b"}]}" if width > 1 else b"]}"
    parts = [
        open_objects[start] + b',"top_logprobs":[' + b"},".join(open_objects[start + 1 : start + width]) + end
        for start in range(0, len(open_objects), width)
    ]
    return (b"[" + b",".join(parts) + b"]").decode()


class _Pieces(dict[bytes, bytes]):
    """A token's bytes -> a piece of JSON, made at the first look-up. The others cost no call of Python's."""

    def __init__(self, make: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_bytes: bytes) -> bytes:
        if len(self) >= _MAX_PIECES:
            self.clear()
        piece = self[token_bytes] = self._make(token_bytes)
        return piece


def _chat_head(name: str, token_bytes: bytes) -> bytes:
    """Return the beginning of a candidate's object, up to its log-probability."""
    return b'{"token":%b,"bytes":%b,"logprob":' % (orjson.dumps(name), orjson.dumps(list(token_bytes)))


_CHAT_HEADS = _Pieces(lambda token_bytes: _chat_head(token_bytes.decode(errors="replace"), token_bytes))
_KEYS = _Pieces(lambda token_bytes: orjson.dumps(name_by_text(token_bytes)) + b":")


def _keys(token_ids: Sequence[int], token_bytes: Sequence[bytes], names_by_id: bool) -> list[bytes]:
    """Return the names of tokens as keys of a JSON object."""
    if names_by_id:
        return [b'"token_id:%d":' % token_id for token_id in token_ids]
    return list(map(_KEYS.__getitem__, token_bytes))


def _numbers(logprobs: F32) -> list[bytes]:
    """Return log-probabilities as JSON, in the digits that tell one float32 from its neighbours."""
    numbers = orjson.dumps(logprobs, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    if b"null" in numbers:  # minus infinity
        numbers = numbers.replace(b"null", b"%.1f" % LOWEST_LOGPROB)
    return numbers.split(b",") if numbers else []
