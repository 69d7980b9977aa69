"""The form that an output must take, as users ask for it and as the tiers send it to each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_FORM_BYTES = 1 << 17
"""The largest form in bytes of UTF-8: about 5,000 properties of a schema."""
MAX_MASK_ITEMS = 12_000
"""The most parser items that one mask may take in a worker, where llguidance's own limit is 50,000.

An object of 490 optional properties, of which a row of the parser holds 500, needs 8,000 to 10,000 over SmolLM2's
vocabulary behind its first key, where each comma that a token may end with begins a full row. The worst ambiguous
grammars take 0.3 s for so many; so there is a limit of time as well."""
MAX_TRIED_ITEMS = 10_000
"""The same when a frontend tries a form. It is less, since outputs may need more than those that were tried.

A form that is accepted should not fail in the middle of an answer."""
MAX_TRIED_MASK_S = 0.02
"""CPU time that a mask may take, but for one, when a frontend tries a form. One of 500 optional properties takes
4 ms."""


FORM_NAMES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of `StructuredOutputs` of which exactly one is set."""


class GrammarSyntax(Enum):
    """The language that a grammar is written in."""

    ANY = "any"
    """Lark if it has a rule `start`, else GBNF."""
    GBNF = "gbnf"
    """llama.cpp's variant of EBNF; it begins with the rule `root`."""
    LARK = "lark"
    """llguidance's variant of Lark; it begins with the rule `start`."""
    COMPILED = "compiled"
    """llguidance's own JSON, which frontends make of every form. Not for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one form that the output must take; the frontend refuses none and several.

        StructuredOutputs(json={"type": "object", "properties": {"age": {"type": "integer"}}})
        StructuredOutputs(regex="[0-9]{5}")
        StructuredOutputs(choice=["yes", "no"])

    Behind the frontend it is always a `grammar` of syntax COMPILED.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object; always text after construction."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that matches the whole output."""
    choice: Sequence[str] | None = None
    """Texts of which the output is one; always a tuple after construction."""
    grammar: str | None = None
    """A context-free grammar."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with sections of JSON that begin with certain texts, as vLLM has it; text after construction."""
    syntax: GrammarSyntax = GrammarSyntax.ANY
    """The language of `grammar`."""
    any_whitespace: bool = False
    """Whether JSON may have white space between its tokens, any amount of it."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON; None: as `any_whitespace` says."""
    strict: bool = True
    """Refuse a JSON schema that cannot be enforced whole. False: enforce as much of it as can be; the answer says what
    was not."""

    def __post_init__(self) -> None:
        """Make it hashable.

        Raises:
            TypeError, ValueError: The schema cannot be written as JSON.
        """
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, json.dumps(value))
        if self.choice is not None and not isinstance(self.choice, str):
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def given(self) -> dict[str, str | tuple[str, ...] | bool]:
        """The forms that are set, by field; a valid object has one."""
        forms = {name: getattr(self, name) for name in FORM_NAMES}
        return {name: value for name, value in forms.items() if value is not None and value is not False}

    @property
    def texts(self) -> list[str]:
        """All texts that the client wrote, in no order."""
        values = (
            *(self.json, self.regex, self.grammar, self.structural_tag, self.whitespace_pattern),
            *(self.choice or ()),
        )
        return [text for text in values if isinstance(text, str)]


def compiled(grammar: str) -> StructuredOutputs:
    """Return the form as it is behind the frontend.

    Args:
        grammar: JSON that llguidance takes.
    """
    return StructuredOutputs(grammar=grammar, syntax=GrammarSyntax.COMPILED)
