"""Stop strings: text that ends an output and never leaks, even when it spans tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that ended an output."""

    stop: str
    end: int
    """Number of characters of the `push` that found it, up to its last one."""


class StopChecker:
    """Passes text through until a stop string is complete; owned by one request.

    Text that could still become a stop string is held back. Of several stop strings the one completed
    first wins; of those completed by the same character, the longest. A character costs the same
    however long the stop strings are, and next to nothing where none could begin or go on.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """`stop` may be empty: everything then passes at once. Each string must not be empty."""
        # The longest first, so that it is found first among those that end with the same character.
        self._matchers = [_Matcher(string) for string in sorted(stop, key=len, reverse=True)]
        self._include = include_stop_str_in_output
        self._held = ""

    def push(self, text: str, *, num_exempt: int = 0) -> tuple[str, StopMatch | None]:
        """Take more text; return what may be shown, and the match that ends it all.

        After a match the rest of the text is not looked at, and the checker must not be used again.

        Args:
            num_exempt: The first so many characters cannot end the output: a stop string that they complete is
                ignored. One that begins in them and is completed after them counts.
        """
        match, limit, num_held = None, len(text), 0
        for matcher in self._matchers:
            if matcher.num_matched or matcher.first in text:
                if end := matcher.find(text, limit, num_exempt):
                    match, limit = StopMatch(matcher.string, end), end - 1
                num_held = max(num_held, matcher.num_matched)
        whole = self._held + text
        if match is not None:
            num_shown = len(self._held) + match.end - (0 if self._include else len(match.stop))
            self._held = ""
            return whole[:num_shown], match
        num_shown = len(whole) - num_held
        self._held = whole[num_shown:]
        return whole[:num_shown], None

    def flush(self) -> str:
        """The end of the output without a match: what was held back."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Follows one string through a text (Knuth, Morris and Pratt), from one place where it could begin to the next."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.first = string[0]
        self.num_matched = 0
        """The longest beginning of the string, short of all of it, that the text ends with."""
        self._fallbacks = _borders(string)

    def find(self, text: str, limit: int, num_exempt: int) -> int:
        """Go on through the first `limit` characters of a text, up to the end of the string.

        Args:
            num_exempt: The first so many characters complete nothing that counts.

        Returns:
            How many characters that were; 0: the string is not there.
        """
        string, fallbacks, matched, place = self.string, self._fallbacks, self.num_matched, 0
        while place < limit:
            if not matched and (place := text.find(self.first, place, limit)) < 0:
                break
            while matched and string[matched] != text[place]:
                matched = fallbacks[matched - 1]
            if string[matched] == text[place]:
                matched += 1
            place += 1
            if matched == len(string):
                matched = fallbacks[-1]
                if place > num_exempt:
                    self.num_matched = matched
                    return place
        self.num_matched = matched
        return 0


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
