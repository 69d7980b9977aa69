"""Token ids -> text while they arrive, exact at character borders."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from triptych.text.tokenizer import Tokenizer
from triptych.types.step import U32

# A character is at most 4 bytes and a token at least 1, so what is incomplete began within the last 3.
_CONTEXT_TOKENS = 3
_REPLACEMENT = "\ufffd"
_MOST_TOKENS = 16  # of a window, however long its bytes make no character


def create_detokenizer(
    tokenizer: Tokenizer,
    *,
    prompt_token_ids: Sequence[int] | U32 = (),
    skip_special_tokens: bool = True,
) -> IncrementalDetokenizer:
    """Start after `prompt_token_ids`: the output continues their text.

    With a prompt, a leading space is the output's own and a character that the prompt's last token began is
    completed; without it, the text is that of the output only.
    """
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    context: list[int] = []
    for token_id in reversed(prompt_token_ids):
        if token_id not in skipped:
            context.insert(0, int(token_id))
            if len(context) == _CONTEXT_TOKENS:
                break
    kind = ByteDetokenizer if tokenizer.is_exact else WindowDetokenizer
    return kind(tokenizer, context, skipped)


class IncrementalDetokenizer(ABC):
    """The text of one growing output; owned by one request.

    The pieces, joined, equal `tokenizer.decode` of the whole output. A character spread over tokens comes out with its
    last byte; bytes that can never become one come out as U+FFFD as soon as that is certain.

    Neither of the supported decoders puts spaces between special tokens, so `spaces_between_special_tokens` has nothing
    to decide here.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""

    @abstractmethod
    def flush(self) -> str:
        """The end of the output: U+FFFD for a character that never was completed, else empty."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """All that the next tokens depend on, for `count_tokens`."""

    @abstractmethod
    def _set_state(self, state: Any) -> None: ...

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Like `push`, one text per token, which costs more."""
        return [self.push((token_id,)) for token_id in token_ids]

    def count_tokens(self, state: Any, token_ids: Sequence[int], num_characters: int) -> int:
        """Return how many tokens complete so many characters; one more than there are if the flush does.

        Args:
            state: As of before the tokens were pushed.
        """
        last = self.state
        self._set_state(state)
        num_tokens = 1
        for token_id in token_ids:
            num_characters -= len(self.push((token_id,)))
            if num_characters <= 0:
                break
            num_tokens += 1
        self._set_state(last)
        return num_tokens


class ByteDetokenizer(IncrementalDetokenizer):
    """Text that is the bytes of its tokens, joined. A token costs a table look-up, however long the output is."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        """
        Args:
            context: The visible tokens before the output, as many as may matter.
            skipped: Tokens without text.
        """
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in context:
            self._decoder.decode(self._token_bytes(token_id))
        self._drops_space = tokenizer.strips_leading_space and not context

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._text(
            b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        )

    def flush(self) -> str:
        return self._text(b"", final=True)

    @property
    def state(self) -> tuple[tuple[bytes, int], bool]:
        """The decoder's own state, and whether a leading space is still to be dropped."""
        return self._decoder.getstate(), self._drops_space

    def _set_state(self, state: tuple[tuple[bytes, int], bool]) -> None:
        decoder, self._drops_space = state
        self._decoder.setstate(decoder)

    def _text(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer(IncrementalDetokenizer):
    """Text by the tokenizer's own decoder, of the last few tokens and those that are new.

    For decoders that look at a token's neighbours: what a token adds is what the window's text has grown by. A token
    costs a call of the library.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        """As of `ByteDetokenizer`."""
        self._decode = tokenizer.decode_all
        self._skipped = skipped
        self._window = tuple(context)
        self._num_shown = len(self._complete(self._decode(self._window)))
        """Characters of the window's text that are out."""

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        # one by one, so that the text does not depend on how tokens arrive
        for token_id in token_ids:
            if token_id not in self._skipped:
                text += self._grow(int(token_id))
        return text

    def flush(self) -> str:
        text = self._decode(self._window)[self._num_shown :]
        self._num_shown += len(text)
        return text

    @property
    def state(self) -> tuple[tuple[int, ...], int]:
        """The window's tokens, and how many characters of their text are out."""
        return self._window, self._num_shown

    def _set_state(self, state: tuple[tuple[int, ...], int]) -> None:
        self._window, self._num_shown = state

    def _grow(self, token_id: int) -> str:
        self._window += (token_id,)
        text = self._decode(self._window)
        complete = self._complete(text)
        grown = complete[self._num_shown :]
        self._num_shown = max(self._num_shown, len(complete))
        if complete == text or len(self._window) > _MOST_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._num_shown = len(self._complete(self._decode(self._window)))
        return grown

    @staticmethod
    def _complete(text: str) -> str:
        """Return a text without the bytes at its end that the next tokens may make a character of."""
        return text[: max(len(text.rstrip(_REPLACEMENT)), len(text) - _CONTEXT_TOKENS)]
