r"""Makes JSON of what a model wrote as JSON, while it streams.

Valid JSON passes through as it is. The rest is mended where what is meant is plain, and closed where it ends too soon:

    {'a': True, "b": [1, 2,], c: "two      ->   {"a": true, "b": [1, 2], "c": "two\nlines"}
    lines

A member is passed on with the first character of its value, a number or a word when it is complete. So the text that
has been passed on can always be closed to a value that holds nothing which the model did not write.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import ClassVar

_CLOSER = {"{": "}", "[": "]"}
_OPENER = {"}": "{", "]": "["}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER_BEGINNING = re.compile(r"-|-?[0-9]+(\.|\.[0-9]*[eE][+-]?|[eE][+-]?)")
_PLAIN = {quote: re.compile(rf'[^"{quote}\\\x00-\x1f]+') for quote in "\"'"}
"""Quote of a string -> the characters that stay as they are in JSON."""
_KEY = re.compile(r"[^\W\d][\w$-]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPACE = frozenset(" \t\n\r")


class MalformedCallError(Exception):
    """The text began like a call and is none."""


class _At(Enum):
    """The part of the value that the next character belongs to."""

    VALUE = auto()
    KEY = auto()
    COLON = auto()
    BEHIND_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    WORD = auto()


class JsonMender:
    """Reads one value."""

    def __init__(self) -> None:
        self.is_complete = False
        """The value has ended: what follows is not a part of it."""
        self.has_begun = False
        self._out: list[str] = []
        self._held = ""
        """Text that leaves with the next value: a comma, white space, a key and a colon."""
        self._open: list[str] = []
        """Brackets that are open, the outermost first."""
        self._at = _At.VALUE
        self._quote = ""
        self._is_key = False
        """The string that is read is a key."""
        self._escape = ""
        """The beginning of an escape sequence, or empty."""
        self._word = ""
        """The beginning of a number, of a word or of a key without quotes."""

    def feed(self, text: str, start: int) -> tuple[str, int]:
        """Read text from a place on.

        Returns:
            New JSON, and how many characters have been read. Fewer than there are: the value has ended.

        Raises:
            MalformedCallError: No value begins here.
        """
        place = start
        while place < len(text) and not self.is_complete:
            if self._at is _At.STRING and (match := _PLAIN[self._quote].match(text, place)):
                self._add_to_string(match[0])
                place = match.end()
                continue
            if self._READERS[self._at](self, text[place]):
                place += 1
        out, self._out = "".join(self._out), []
        return out, place - start

    def close(self) -> str:
        """End a value that has begun; return what is missing."""
        if self._at in (_At.STRING, _At.ESCAPE) and not self._is_key:
            self._out.append('"')
        elif self._at is _At.WORD and not self._is_key and self._is_word_whole:
            self._end_word()
        self._held = ""
        self._out += [_CLOSER[bracket] for bracket in reversed(self._open)]
        self._open.clear()
        self.is_complete = True
        out, self._out = "".join(self._out), []
        return out

    @property
    def _is_word_whole(self) -> bool:
        is_beginning = any(word != self._word and word.startswith(self._word) for word in _WORDS)
        return not is_beginning and not _NUMBER_BEGINNING.fullmatch(self._word)

    def _pass_held(self, text: str) -> None:
        """Pass on what waits for a value, and the value's beginning."""
        self.has_begun = True
        self._out += (self._held, text)
        self._held = ""

    def _end_value(self) -> None:
        self._at = _At.BEHIND_VALUE
        self.is_complete = not self._open

    def _give_up(self) -> None:
        """End the value before a character that cannot be a part of it."""
        if not self.has_begun:
            raise MalformedCallError
        self._out = [self.close()]

    # Each reads one character and returns whether it belongs to what it reads.

    def _read_value(self, character: str) -> bool:
        if character in _SPACE:
            self._held += character
        elif character in "\"'":
            self._pass_held('"')
            self._at, self._quote, self._is_key = _At.STRING, character, False
        elif character in _CLOSER:
            self._pass_held(character)
            self._open.append(character)
            self._at = _At.KEY if character == "{" else _At.VALUE
        elif _is_of_word(character):
            self._at, self._word, self._is_key = _At.WORD, character, False
        elif self._open and character in ",]}":
            self._read_missing_value(character)
            return character == ","
        else:
            self._give_up()
            return False
        return True

    def _read_missing_value(self, character: str) -> None:
        """A member without a value is null. An entry that is left out is none."""
        if self._open[-1] == "{":
            self._pass_held("null")
            self._at = _At.BEHIND_VALUE
            if character == ",":
                self._read_behind_value(character)
        elif character != ",":
            self._at = _At.BEHIND_VALUE

    def _read_key(self, character: str) -> bool:
        if character in _SPACE:
            self._held += character
        elif character in "\"'":
            self._held += '"'
            self._at, self._quote, self._is_key = _At.STRING, character, True
        elif character in "]}":
            self._at = _At.BEHIND_VALUE
            return False
        elif _KEY.fullmatch(character):
            self._at, self._word, self._is_key = _At.WORD, character, True
        elif character != ",":
            self._give_up()
            return False
        return True

    def _read_colon(self, character: str) -> bool:
        if character in _SPACE:
            self._held += character
        elif character == ":":
            self._held += ":"
            self._at = _At.VALUE
        else:
            self._give_up()
            return False
        return True

    def _read_behind_value(self, character: str) -> bool:
        if character in _SPACE:
            self._held += character
        elif character == ",":
            self._held += ","
            self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
        elif character in _OPENER and _OPENER[character] in self._open:
            self._close_bracket(character)
        elif character in "\"'" or (self._open[-1] == "[" and (character in "{[" or character.isalnum())):
            self._held = f",{self._held}"  # it was forgotten
            self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
            return False
        else:
            self._give_up()
            return False
        return True

    def _close_bracket(self, character: str) -> None:
        """Close a bracket, and those inside of it. A comma before it goes."""
        self._out.append(self._held.replace(",", "", 1))
        self._held = ""
        while (bracket := self._open.pop()) != _OPENER[character]:
            self._out.append(_CLOSER[bracket])
        self._out.append(character)
        self._end_value()

    def _read_string(self, character: str) -> bool:
        if character == self._quote:
            self._add_to_string('"')
            if self._is_key:
                self._at = _At.COLON
            else:
                self._end_value()
        elif character == "\\":
            self._at, self._escape = _At.ESCAPE, character
        else:
            self._add_to_string('\\"' if character == '"' else _escaped(character))
        return True

    def _read_escape(self, character: str) -> bool:
        self._escape += character
        if len(self._escape) > 2:  # \u and digits
            if character not in _HEX:
                self._end_escape("\\" + self._escape[:-1])
                return False
            if len(self._escape) == 6:
                self._end_escape(self._escape)
        elif character in '"\\/bfnrt':
            self._end_escape(self._escape)
        elif character != "u":
            self._end_escape(character if character == "'" else "\\\\" + _escaped(character))
        return True

    def _end_escape(self, text: str) -> None:
        self._at, self._escape = _At.STRING, ""
        self._add_to_string(text)

    def _add_to_string(self, text: str) -> None:
        if self._is_key:
            self._held += text
        else:
            self._out.append(text)

    def _read_word(self, character: str) -> bool:
        if _is_of_word(character) or (self._is_key and character == "$"):
            self._word += character
            return True
        self._end_word()
        return False

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if self._is_key:
            self._held += f'"{word}"'
            self._at = _At.COLON
            return
        self._pass_held(word if _NUMBER.fullmatch(word) else _WORDS.get(word, f'"{word}"'))
        self._end_value()

    _READERS: ClassVar[dict[_At, Callable[[JsonMender, str], bool]]] = {
        _At.VALUE: _read_value,
        _At.KEY: _read_key,
        _At.COLON: _read_colon,
        _At.BEHIND_VALUE: _read_behind_value,
        _At.STRING: _read_string,
        _At.ESCAPE: _read_escape,
        _At.WORD: _read_word,
    }


def mended_object(text: str) -> str:
    """Return the JSON object that a text holds, or begins with.

    Raises:
        MalformedCallError: It begins with none.
    """
    text = text.lstrip()
    if not text.startswith("{"):
        raise MalformedCallError
    mender = JsonMender()
    out, _ = mender.feed(text, 0)
    return out if mender.is_complete else out + mender.close()


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character in "+-._"


def _escaped(character: str) -> str:
    """Return a character of a string as JSON writes it."""
    if character >= " ":
        return character
    return _CONTROL.get(character, f"\\u{ord(character):04x}")
