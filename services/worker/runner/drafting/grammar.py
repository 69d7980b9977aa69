"""Guesses from the form of an output: what its grammar forces, and how the row has spelled such places so far.

    known      {  "  name  ":  "  Ann  ",
    forced                                  " age ":          one after the other, as bytes
    guessed                                 "  age  ":        the tokens of the name; marks as the row spells them

A grammar forces bytes, and a model has spellings of its own for them: `":"` may be one token or two. Tokens of JSON's
punctuation, called marks here, are guessed as the row has written them before, names as the tokenizer cuts them. Where
no byte is forced, the next name that a schema allows, or the white space that the row uses, is a good guess too.

A matcher that was asked for forced bytes holds to them from then on, so guesses are made with a copy. Needs no torch.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from triptych.types.step import NewRow
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.sampling.params import TokenHistory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_GRAMMAR_CHARS = 8192
"""Rows with a longer grammar are not looked ahead of: it may force texts that take long to find."""
_MAX_KEYS = 64
"""Names of a schema that are guessed, the first ones."""
_BYTES_PER_TOKEN = 32
"""Forced bytes that are cut into tokens for each guess."""
_TIME_SHARE, _TIME_BURST_S = 0.1, 0.02
"""The part of the time that looking ahead may take, and what it may take at once."""
_SLOW_S = 0.005
"""A row is not looked ahead of after this has taken so long twice: once builds automata. As all times here it is the
thread's own: a search is no slower for what else a machine does meanwhile."""
_MARK_BYTES = frozenset(b'{}[]":, \n\r\t')
_MARKS = re.compile(rb'\s*[{}\[\]":,][\s{}\[\]":,]*')
_OPENS_VALUE = re.compile(rb':\s*"$')
_RUN_BYTES = 64
"""Bytes of marks in a row that are kept."""


class FormMatchers(Protocol):
    """The matchers of a runner's rows that have a form."""

    @property
    def tokenizer(self) -> LLTokenizer | None:
        """Cuts texts as the model's tokenizer does; None before the first grammar is compiled."""

    def look_ahead(self, slot: int) -> LLMatcher | None:
        """Return a copy of the matcher of a slot that has taken in all known tokens; None: nothing can be matched."""


@dataclass(slots=True)
class _Spelling:
    """The marks of a row's output."""

    followers: dict[bytes, set[int]] = field(default_factory=dict)
    """Last byte of a mark, or none for any other token -> the marks that have followed it."""
    run: bytes = b""
    """The marks at the end."""


@dataclass(slots=True)
class _FormRow:
    keys: tuple[bytes, ...]
    """Names of its schemas."""
    is_canonical: bool
    """Whether all tokens are chosen with a mask. Where bytes are forced, it has the tokenizer's own spelling only."""
    spelling: _Spelling = field(default_factory=_Spelling)
    num_seen: int = 0
    """Tokens of the output that the spelling has taken in."""
    num_slow: int = 0


class GrammarProposer:
    """A `Proposer`."""

    name = "grammar"

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        *,
        history: TokenHistory,
        forms: FormMatchers,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            eos_token_ids: Tokens that end an output; the first one is guessed where nothing else can follow.
        """
        self._end = list(eos_token_ids[:1])
        self._history = history
        self._forms = forms
        self._clock = clock
        self._rows: dict[int, _FormRow] = {}
        self._cutter: _Cutter | None = None
        """The tokenizer at work; None before the first grammar is compiled."""
        self._credit_s = _TIME_BURST_S
        """Time that looking ahead may take now."""
        self._asked_at: float | None = None
        """Since when it grows; None: nothing was asked yet. Another thread may have created this."""

    def enter(self, row: NewRow) -> None:
        form = row.sampling.structured_outputs
        if form is not None and form.grammar is not None and len(form.grammar) <= _MAX_GRAMMAR_CHARS:
            is_canonical = row.sampling.has_filters and not row.sampling.is_greedy
            self._rows[row.slot] = _FormRow(_keys_of(form.grammar), is_canonical)

    def leave(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def accept(self, slots: I64, counts: I64) -> None:
        """Do nothing: a row's tokens are taken in when it is asked."""

    def propose(self, slots: I64, limits: I64) -> Guesses:
        parts = [
            self._guess(row, slot, limit) if (row := self._rows.get(slot)) is not None else []
            for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True)
        ]
        counts = np.array([len(part) for part in parts], np.int64)
        return Guesses(np.array([token_id for part in parts for token_id in part], np.int64), counts)

    def _guess(self, row: _FormRow, slot: int, limit: int) -> list[int]:
        """Return up to `limit` guesses, unless rows with forms have taken too much time lately."""
        started = self._clock()
        if self._asked_at is not None:
            self._credit_s = min(self._credit_s + (started - self._asked_at) * _TIME_SHARE, _TIME_BURST_S)
        self._asked_at = started
        if self._credit_s <= 0 or row.num_slow > 1:
            return []
        guesses: list[int] = []
        matcher = self._forms.look_ahead(slot)
        if matcher is not None:
            if self._cutter is None:
                tokenizer = self._forms.tokenizer
                assert tokenizer is not None, "it has compiled the matcher"
                self._cutter = _Cutter(tokenizer)
            first, end = int(self._history.num_prompt[slot]), int(self._history.num_known[slot])
            output = self._history.token_ids[slot, first + row.num_seen : end].tolist()
            row.num_seen = end - first
            for token_id in output:
                self._cutter.take_in(row.spelling, token_id)
            guesses = self._walk(matcher, row, limit)
        took_s = self._clock() - started
        self._credit_s -= took_s
        row.num_slow += took_s > _SLOW_S
        return guesses

    def _walk(self, matcher: LLMatcher, row: _FormRow, limit: int) -> list[int]:
        """Return the guesses that follow, each taken in by the matcher, which is the caller's copy."""
        assert self._cutter is not None, "created before"
        found: list[int] = []
        run = row.spelling.run
        while len(found) < limit:
            forced = matcher.compute_ff_bytes()[: _BYTES_PER_TOKEN * limit]
            if forced and row.is_canonical and (own := matcher.compute_ff_tokens()):
                part = own
            elif forced:
                part = self._cutter.cut(forced, row.spelling.followers.get(run[-1:], ()), matcher)
            elif matcher.is_stopped():
                return found if matcher.is_error() else found + self._end
            else:
                part = self._cutter.likely(matcher, row, run)
            num_taken = matcher.try_consume_tokens(part)
            found += part[:num_taken]
            if num_taken < len(part) or not part:
                break
            mark = self._cutter.bytes_of(part[-1])
            run = run + mark if mark else b""
        return found[:limit]


class _Cutter:
    """Cuts texts of a grammar into tokens."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        """Token -> its bytes if it is a mark, else none."""
        self._letter = tokenizer.tokenize_bytes(b"x")
        """A letter, which may follow anything within a text, and hardly any mark."""
        self._end_of_key = tokenizer.tokenize_bytes(b'":')

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a mark; none for another token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._tokenizer.decode_bytes([token_id])
            if self._tokenizer.is_special_token(token_id) or not _MARK_BYTES.issuperset(known):
                known = b""
            self._bytes[token_id] = known
        return known

    def take_in(self, spelling: _Spelling, token_id: int) -> None:
        """Take in the next token of an output."""
        mark = self.bytes_of(token_id)
        if mark:
            spelling.followers.setdefault(spelling.run[-1:], set()).add(token_id)
        spelling.run = (spelling.run + mark)[-_RUN_BYTES:] if mark else b""

    def cut(self, forced: bytes, followers: Iterable[int], matcher: LLMatcher) -> list[int]:
        """Return the tokens of a forced text's first part: one mark, or all up to the next mark.

        Args:
            followers: Marks that have followed what is before it.
        """
        marks = _MARKS.match(forced)
        if marks is None:
            next_marks = _MARKS.search(forced)
            return self._tokenizer.tokenize_bytes(forced[: next_marks.start()] if next_marks else forced)
        for token_id in self._longest_first(followers):
            own = self.bytes_of(token_id)
            if forced.startswith(own) or (own.startswith(forced) and matcher.validate_tokens([token_id])):
                return [token_id]
        return self._tokenizer.tokenize_bytes(marks[0])[:1]

    def likely(self, matcher: LLMatcher, row: _FormRow, run: bytes) -> list[int]:
        """Return what may follow a mark where no byte is forced: the next name of a schema, or another mark."""
        if run.endswith(b'"') and not _OPENS_VALUE.search(run):
            for key in row.keys:
                part = self._tokenizer.tokenize_bytes(key)
                whole = part + self._end_of_key  # what a text that is no name cannot have
                if matcher.validate_tokens(whole) == len(whole):
                    return part
            return []
        if not run or matcher.validate_tokens(self._letter):  # within a text, marks are as good as anything
            return []
        for token_id in self._longest_first(row.spelling.followers.get(run[-1:], ())):
            if not run.endswith(self.bytes_of(token_id)) and matcher.validate_tokens([token_id]):
                return [token_id]
        return []

    def _longest_first(self, marks: Iterable[int]) -> list[int]:
        return sorted(marks, key=lambda token_id: (-len(self.bytes_of(token_id)), token_id))


@lru_cache(maxsize=64)
def _keys_of(grammar: str) -> tuple[bytes, ...]:
    """Return the names of the properties in a grammar's schemas, as JSON spells them, without their quotes.

    Args:
        grammar: In llguidance's JSON.
    """
    try:
        parts: list[Any] = [part.get("json_schema") for part in reversed(json.loads(grammar)["grammars"])]
    except (ValueError, RecursionError):
        return ()  # the compiler says what is wrong
    keys: dict[bytes, None] = {}
    while parts and len(keys) < _MAX_KEYS:
        part = parts.pop()
        if isinstance(part, list):
            parts += reversed(part)
        elif isinstance(part, dict):
            properties = part.get("properties")
            for key in properties if isinstance(properties, dict) else ():
                keys[json.dumps(key, ensure_ascii=False)[1:-1].encode()] = None
            parts += reversed(part.values())
    return tuple(keys)[:_MAX_KEYS]
