"""Token ids -> text while they arrive, exact at character borders."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from triptych.text.tokenizer import Tokenizer
from triptych.types.step import U32

# A character is at most 4 bytes and a token at least 1, so what is incomplete began within the last 3.
_CONTEXT_TOKENS = 3

DetokenizerState = tuple[tuple[bytes, int], bool]
"""The decoder's own state, and whether a leading space is still to be dropped."""


class IncrementalDetokenizer:
    """The text of one growing output; owned by one request.

    The pieces, joined, equal `tokenizer.decode` of the whole output. A character spread over tokens
    comes out with its last byte; bytes that can never become one come out as U+FFFD as soon as that is
    certain. A token costs a table look-up, however long the output is.

    Neither of the supported decoders puts spaces between special tokens, so
    `spaces_between_special_tokens` has nothing to decide here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] | U32 = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Start after `prompt_token_ids`: the output continues their text.

        With a prompt, a leading space is the output's own and a character that the prompt's last token
        began is completed; without it, the text is that of the output only.
        """
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        visible = (int(token_id) for token_id in reversed(prompt_token_ids) if token_id not in self._skipped)
        context = list(itertools.islice(visible, _CONTEXT_TOKENS))
        for token_id in reversed(context):
            self._decoder.decode(self._token_bytes(token_id))
        self._drops_space = tokenizer.strips_leading_space and not context

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._text(
            b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped])
        )

    @property
    def state(self) -> DetokenizerState:
        """All that the next tokens depend on, for `count_tokens`."""
        return self._decoder.getstate(), self._drops_space

    def count_tokens(self, state: DetokenizerState, token_ids: Sequence[int], num_characters: int) -> int:
        """Return how many tokens complete so many characters; one more than there are if the flush does.

        Args:
            state: As of before the tokens were pushed.
        """
        last = self.state
        self._set_state(state)
        num_tokens = 1
        for piece in self.pieces(token_ids):
            num_characters -= len(piece)
            if num_characters <= 0:
                break
            num_tokens += 1
        self._set_state(last)
        return num_tokens

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Like `push`, one text per token, which costs more."""
        return [
            self._text(b"" if token_id in self._skipped else self._token_bytes(token_id))
            for token_id in token_ids
        ]

    def flush(self) -> str:
        """The end of the output: U+FFFD for a character that never was completed, else empty."""
        return self._text(b"", final=True)

    def _set_state(self, state: DetokenizerState) -> None:
        decoder, self._drops_space = state
        self._decoder.setstate(decoder)

    def _text(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text
