"""Log-probabilities of a prompt that is repeated at the head of a completion, as OpenAI spells them."""

from __future__ import annotations

import codecs

from triptych.types.events import PromptLogprobsEvent

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot spell; as OpenAI does
_SEARCHED_CHARS = 64


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can spell."""
    return max(logprob, LOWEST_LOGPROB)


def spell(token_bytes: bytes) -> str:
    """Return a token's text, or its bytes in OpenAI's spelling: parts of characters differ in these only."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class EchoLogprobs:
    """One prompt's tokens; grows by parts, then is shared by all choices."""

    def __init__(self, first_token_bytes: bytes) -> None:
        self._pieces = [first_token_bytes]
        self.token_logprobs: list[float | None] = [None]
        """[num_prompt_tokens] None for the first token: nothing predicts it."""
        self.top_logprobs: list[dict[str, float] | None] = [None]

    @property
    def tokens(self) -> list[str]:
        """[num_prompt_tokens] as `spell` has them."""
        return list(map(spell, self._pieces))

    def add(self, event: PromptLogprobsEvent) -> None:
        """Append the next part."""
        num_candidates = event.logprobs.token_ids.shape[1]
        self._pieces += event.token_bytes[::num_candidates]
        names = list(map(spell, event.token_bytes))
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
