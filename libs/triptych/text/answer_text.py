"""The text of an answer while it streams, and how pieces of it are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, TypeVar

from triptych.text.json_mending import JsonMender, MalformedCallError

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads text; yields when it needs more than has come."""
_SPACE = re.compile(r"\s")


class AnswerEndedError(Exception):
    """The answer has ended where more text was needed."""


class AnswerText:
    """The text of an answer up to now. Methods that read are generators: `yield from` them."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = 0
        """Text from here on is kept."""
        self.is_ended = False
        self.is_cut = False
        """The answer has ended inside of a value, which was closed."""

    def push(self, text: str) -> None:
        if self._mark:
            self._text = self._text[self._mark :]
            self._at -= self._mark
            self._mark = 0
        self._text += text

    def forget(self) -> None:
        """Keep only what has not been read."""
        self._mark = self._at

    def rewind(self) -> None:
        """Read again what has been read since `forget`."""
        self._at = self._mark

    def take(self, count: int) -> str:
        """Read the next characters, which have come."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        return taken

    def take_all(self) -> str:
        """Read everything that has come."""
        return self.take(len(self._text) - self._at)

    @property
    def unread(self) -> str:
        return self._text[self._at :]

    def unread_last(self, count: int) -> None:
        """Read the last characters again, which have been read since `forget`."""
        assert count <= self.num_held
        self._at -= count

    @property
    def is_exhausted(self) -> bool:
        """The answer has ended, and everything of it has been read."""
        return self.is_ended and self._at == len(self._text)

    @property
    def num_held(self) -> int:
        """Characters that have been read since `forget`."""
        return self._at - self._mark

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            AnswerEndedError: There is no more.
        """
        if self.is_ended:
            raise AnswerEndedError
        yield

    def starts_with(self, text: str) -> Reading[bool]:
        """Return whether this comes next; wait only as long as it may."""
        while True:
            num_unread = len(self._text) - self._at
            if num_unread >= len(text) or self.is_ended:
                return self._text.startswith(text, self._at)
            if not text.startswith(self._text[self._at :]):
                return False
            yield from self.wait()

    def take_begun(self, text: str) -> Reading[bool]:
        """Read this text if it comes next, or as much of it as comes before the end of the answer."""
        if (yield from self.take_if(text)):
            return True
        is_cut = self.is_ended and not self.is_exhausted and text.startswith(self.unread)
        if is_cut:
            self.take_all()
        return is_cut

    def take_if(self, text: str) -> Reading[bool]:
        """Read this text if it comes next."""
        is_next = yield from self.starts_with(text)
        if is_next:
            self._at += len(text)
        return is_next

    def expect(self, text: str) -> Reading[None]:
        """Read this text.

        Raises:
            MalformedCallError: Another one comes next.
        """
        if not (yield from self.take_if(text)):
            if self.is_ended and text.startswith(self.unread):
                raise AnswerEndedError
            raise MalformedCallError

    def skip_space(self) -> Reading[None]:
        """Read white space up to something else or the end of the answer."""
        yield from self.skip(_SPACE)

    def skip(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Read the characters that fit, up to another one or the end of the answer."""
        while True:
            while self._at < len(self._text):
                if not pattern.match(self._text, self._at):
                    return
                self._at += 1
            if self.is_ended:
                return
            yield

    def peek(self) -> Reading[str]:
        """Return the next character without reading it."""
        while self._at == len(self._text):
            yield from self.wait()
        return self._text[self._at]

    def take_until(self, *ends: str) -> Reading[str]:
        """Read up to the first of these texts and past it; return what is before it."""
        taken, _ = yield from self.take_until_any(ends)
        return taken

    def take_until_any(self, ends: Sequence[str]) -> Reading[tuple[str, str]]:
        """Read up to the first of these texts and past it; return what is before it, and which it is."""
        longest = max(map(len, ends))
        num_searched = 0  # of the characters that have not been read
        while True:
            place, end = find_first(self._text, ends, self._at + num_searched)
            if end:
                taken = self._text[self._at : place]
                self._at = place + len(end)
                return taken, end
            num_searched = max(0, len(self._text) - self._at - longest + 1)
            yield from self.wait()

    def take_value(self, on_piece: Callable[[str], None] | None = None) -> Reading[str]:
        """Read one value; return it as JSON, or nothing if `on_piece` takes its pieces.

        What is no JSON is mended (`json_mending`). A value in which the answer ends is closed for `on_piece`.

        Raises:
            MalformedCallError: No value begins here.
        """
        mender = JsonMender()
        pieces: list[str] = []
        add = pieces.append if on_piece is None else on_piece
        while not mender.is_complete:
            if self._at < len(self._text):
                piece, count = mender.feed(self._text, self._at)
                self._at += count
                if piece:
                    add(piece)
            elif self.is_ended and on_piece is not None and mender.has_begun:
                add(mender.close())
                self.is_cut = True
            else:
                yield from self.wait()
        return "".join(pieces)


def take_while(text: AnswerText, accepts: Callable[[str], bool]) -> Reading[str]:
    """Read the next characters that are accepted."""
    taken = ""
    while accepts((yield from text.peek())):
        taken += text.take(1)
    return taken


def take_string(text: AnswerText) -> Reading[str]:
    """Read a JSON string and return its value."""
    value = decoded((yield from text.take_value()))
    if not isinstance(value, str):
        raise MalformedCallError
    return value


def take_balanced(text: AnswerText) -> Reading[str]:
    """Read up to the bracket that closes one read before, and past it; return what is before it.

    Brackets inside of quoted strings, as Python writes them, do not count.
    """
    depth, quote, taken = 0, "", ""
    while True:
        yield from text.peek()
        character = text.take(1)
        if quote:
            if character == "\\":
                yield from text.peek()
                character += text.take(1)
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                return taken
            depth -= 1
        taken += character


def decoded(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        MalformedCallError: It is none, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def find_first(text: str, ends: Collection[str], start: int) -> tuple[int, str]:
    """Return the place of the first of these texts, and which it is; (-1, "") if there is none.

    Of several at one place it is the longest.
    """
    best, found = -1, ""
    for end in ends:
        place = text.find(end, start)
        if place >= 0 and (best < 0 or place < best or (place == best and len(end) > len(found))):
            best, found = place, end
    return best, found


def longest_beginning(text: str, ends: Collection[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of one of these texts."""
    longest = 0
    for end in ends:
        for length in range(min(len(end) - 1, len(text)), longest, -1):
            if text.endswith(end[:length]):
                longest = length
                break
    return longest
