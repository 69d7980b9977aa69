"""Log-probabilities as OpenAI's and vLLM's clients read them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from triptych.types.events import PromptLogprobsEvent
from triptych.types.outputs import TokenLogprobs

LOWEST_LOGPROB = -9999.0  # represents minus infinity, which JSON lacks; as OpenAI does
_SEARCHED_CHARS = 64

Naming = Callable[[int, bytes], str]
"""Spells a token of an answer, from its id and its bytes."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can spell."""
    return max(logprob, LOWEST_LOGPROB)


def name_by_text(token_id: int, token_bytes: bytes) -> str:
    """Return the name of a token in OpenAI's completions: its text, or its bytes in OpenAI's spelling.

    Parts of characters differ in their bytes only.
    """
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def name_by_id(token_id: int, token_bytes: bytes) -> str:
    """Return the name of a token where `return_tokens_as_token_ids` is set."""
    return f"token_id:{token_id}"


class EchoLogprobs:
    """One prompt's tokens; grows by parts, then is shared by all choices."""

    def __init__(self, first_token_id: int, first_token_bytes: bytes, name: Naming = name_by_text) -> None:
        self._name = name
        self._pieces = [first_token_bytes]
        self.tokens = [name(first_token_id, first_token_bytes)]
        """[num_prompt_tokens] by their names."""
        self.token_logprobs: list[float | None] = [None]
        """[num_prompt_tokens] None for the first token: nothing predicts it."""
        self.top_logprobs: list[dict[str, float] | None] = [None]

    def add(self, event: PromptLogprobsEvent) -> None:
        """Append the next part."""
        num_candidates = event.logprobs.token_ids.shape[1]
        self._pieces += event.token_bytes[::num_candidates]
        names = list(map(self._name, event.logprobs.token_ids.ravel().tolist(), event.token_bytes))
        self.tokens += names[::num_candidates]
        for row, logprobs in enumerate(event.logprobs.logprobs.tolist()):
            start = row * num_candidates
            values = list(map(finite, logprobs))
            self.token_logprobs.append(values[0])
            self.top_logprobs.append(dict(zip(names[start : start + num_candidates], values, strict=True)))

    def place_in(self, text: str) -> tuple[list[int], int]:
        """Find where each token begins in a text that begins with the prompt; return that, and where the prompt ends.

        A token that the text leaves out, as special ones are, begins where the next one does. One that begins inside a
        character begins where that character does.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, offset = [], 0
        for piece in map(decoder.decode, self._pieces):
            offsets.append(offset)
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


def completion_logprobs(
    entries: Sequence[TokenLogprobs], offset: int, prompt: EchoLogprobs | None, text: str, name: Naming
) -> tuple[dict[str, Any], int]:
    """Return the log-probabilities of new tokens of a completion, and the place where its next token begins.

    Args:
        offset: Where the first of them begins.
        prompt: The prompt, if the text begins with it.
        text: The new text.
    """
    offsets: list[int] = []
    if prompt is not None:
        offsets, offset = prompt.place_in(text)
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token_bytes[0].decode(errors="replace"))
    tokens = [name(entry.token_ids[0], entry.token_bytes[0]) for entry in entries]
    token_logprobs: list[float | None] = [finite(entry.logprobs[0]) for entry in entries]
    top_logprobs: list[dict[str, float] | None] = [
        dict(zip(map(name, entry.token_ids, entry.token_bytes), _all_finite(entry.logprobs), strict=True))
        for entry in entries
    ]
    if prompt is not None:
        tokens = prompt.tokens + tokens
        token_logprobs = prompt.token_logprobs + token_logprobs
        top_logprobs = prompt.top_logprobs + top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }, offset


def chat_logprobs(entries: Sequence[TokenLogprobs], *, names_by_id: bool) -> dict[str, Any]:
    """Return the log-probabilities of new tokens of an answer to a conversation."""
    name = name_by_id if names_by_id else _text_of
    return {"content": [_chat_entry(entry, name) for entry in entries], "refusal": None}


def logprobs_json(logprobs: Mapping[str, Any]) -> str:
    """Return the JSON of log-probabilities, whose names of tokens are texts that UTF-8 can hold."""
    return orjson.dumps(logprobs).decode()


def _chat_entry(entry: TokenLogprobs, name: Naming) -> dict[str, Any]:
    chosen, *top = [
        {"token": token, "logprob": logprob, "bytes": list(token_bytes)}
        for token, logprob, token_bytes in zip(
            map(name, entry.token_ids, entry.token_bytes),
            _all_finite(entry.logprobs),
            entry.token_bytes,
            strict=True,
        )
    ]
    return {**chosen, "top_logprobs": top}


def _text_of(token_id: int, token_bytes: bytes) -> str:
    return token_bytes.decode(errors="replace")


def _all_finite(logprobs: Sequence[float]) -> Sequence[float]:
    return logprobs if min(logprobs) >= LOWEST_LOGPROB else list(map(finite, logprobs))
