"""Stop strings: text that ends an output and never leaks, even when it spans tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that ended an output."""

    stop: str
    num_pieces: int
    """How many pieces of the `push` that found it were needed: the tokens that count."""


class StopChecker:
    """Passes text through until a stop string is complete; owned by one request.

    Text that could still become a stop string is held back. Of several stop strings the one completed
    first wins; of those completed by the same character, the longest. A character costs the same
    however long the stop strings are.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """`stop` may be empty: everything then passes at once. Each string must not be empty."""
        # The longest first, so that it is found first among those that end with the same character.
        self._matchers = [_Matcher(string) for string in sorted(stop, key=len, reverse=True)]
        self._include = include_stop_str_in_output
        self._held = ""

    def push(self, pieces: Sequence[str], *, num_exempt: int = 0) -> tuple[str, StopMatch | None]:
        """Take one piece of text per token; return what may be shown, and the match that ends it all.

        After a match the rest of the pieces is not looked at, and the checker must not be used again.

        Args:
            num_exempt: The first so many pieces cannot end the output: a stop string that they complete is
                ignored. One that begins in them and is completed after them counts.
        """
        text = self._held
        for num_pieces, piece in enumerate(pieces, start=1):
            for index, character in enumerate(piece, start=1):
                stop = self._advance(character)
                if stop is not None and num_pieces > num_exempt:
                    text += piece[:index]
                    self._held = ""
                    shown = text if self._include else text[: len(text) - len(stop)]
                    return shown, StopMatch(stop, num_pieces)
            text += piece
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        num_shown = len(text) - num_held
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """The end of the output without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """The longest stop string that `character` completes. Every matcher must see every character."""
        completed = [matcher.string for matcher in self._matchers if matcher.completes(character)]
        return completed[0] if completed else None


class _Matcher:
    """Follows one string through a text, a character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        """The longest beginning of the string, short of all of it, that the text ends with."""
        self._fallbacks = _borders(string)

    def completes(self, character: str) -> bool:
        matched = self.num_matched
        while matched and self.string[matched] != character:
            matched = self._fallbacks[matched - 1]
        if self.string[matched] == character:
            matched += 1
        complete = matched == len(self.string)
        self.num_matched = self._fallbacks[-1] if complete else matched
        return complete


def _borders(string: str) -> list[int]:
    """For each beginning of the string, the length of its longest proper beginning that is its end too."""
    borders = [0] * len(string)
    border = 0
    for index in range(1, len(string)):
        while border and string[border] != string[index]:
            border = borders[border - 1]
        if string[border] == string[index]:
            border += 1
        borders[index] = border
    return borders
