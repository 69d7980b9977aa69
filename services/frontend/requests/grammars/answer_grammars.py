"""Grammars of whole answers in Lark: reasoning, then a form, or calls of tools as the model writes them: docs/adr/0050.

    <think> free text </think>   { form }
                                 <tool_call>{"name": "add", "arguments": { schema }}</tool_call> …
                                 free text <tool_call>…</tool_call> free text

Used by `grammar_process`: standard library only. How calls are read is in `triptych.text.tool_formats`; a format there
needs its rules here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

FORM = "form"
"""Name of the grammar of the form."""
_TERMINALS = r"""
TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,8}/
"""
_SEPARATORS = r"""
COLON: /: ?/
COMMA: /, ?/
"""
_COMPACT_SEPARATORS = """
COLON: ":"
COMMA: ","
"""
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
"""Texts of the formats that a tokenizer may have as one token each."""
_COMPACT: Mapping[str, Any] = {"whitespace_flexible": False}
_SPACED: Mapping[str, Any] = {**_COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
"""Models write JSON with a space behind its separators, or without."""
_COMPACT_FORMAT = "json_list"
"""The format that is no model's own: its JSON has no spaces, as that of forms."""
_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength")


class Tool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema, as `json_schemas` has rewritten it."""
    options: Mapping[str, Any]
    """Options of the compiler for it."""


class _Trigger(NamedTuple):
    """A text that opens calls anywhere in an answer, and the rule of what follows."""

    opening: str
    rest: str


class AnswerGrammar:
    """Writes the grammar of one answer."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """
        Args:
            tokens: Text of each mark that is a token of its own to the compiler -> its id.
        """
        self._tokens = tokens
        self._json_options = _SPACED
        self._rules: list[str] = []
        self._schemas: list[dict[str, Any]] = []
        self.not_enforced: list[tuple[int, str]] = []
        """Tool and place in its parameters, like `properties.city.pattern`, for which the format has no room."""

    def write(
        self,
        *,
        form: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        format: str,
        has_text: bool,
        has_one: bool,
        reasoning: Sequence[str] | None,
        is_reasoning: bool,
    ) -> str:
        """Return it in llguidance's JSON.

        Args:
            form: Grammars of the form, of which the first begins it; empty: there is none.
            tools: The tools; empty: none is called.
            format: Name of the format of calls.
            has_text: Beside calls there is free text. Otherwise the answer is the form or calls.
            has_one: There is one call at most.
            reasoning: Its opening and its closing mark; None: there is none.
            is_reasoning: The prompt has opened it.
        """
        self._json_options = _COMPACT if format == _COMPACT_FORMAT else _SPACED
        choices = ["@form"] if form else []
        if tools:
            write_calls = _FORMATS[format]
            calls = write_calls(self, tools, has_one)
            if isinstance(calls, str):
                self._add("calls", calls)
                choices.append("calls")
                choices += ["PLAIN"] if has_text else []
            elif has_text:
                choices.append(self._text_with(calls))
            else:
                self._add("call", " | ".join(f"{self._text(each.opening)} {each.rest}" for each in calls))
                self._add("calls", "call" if has_one else "call (SPACE? call)*")
                choices.append("calls")
        thought = self._reasoning(*reasoning, is_open=is_reasoning) if reasoning is not None else ""
        lark = f"%llguidance {{}}\nstart: {thought} answer\nanswer: {' | '.join(choices)}\n"
        lark += "".join(self._rules) + _TERMINALS + _PLAIN.get(format, "")
        lark += _COMPACT_SEPARATORS if format == _COMPACT_FORMAT else _SEPARATORS
        named = [{**each, "name": FORM} if index == 0 else each for index, each in enumerate(form)]
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *named, *self._schemas]})

    def _add(self, name: str, rule: str) -> str:
        self._rules.append(f"{name}: {rule}\n")
        return name.partition("[")[0]

    def _schema(self, schema: Any, tool: Tool) -> str:
        """Return the name of a rule for JSON of a schema, which is a part of those of a tool."""
        name = f"schema_{len(self._schemas)}"
        options = {**self._json_options, **tool.options, "lenient": False}
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"not": {}}
        self._schemas.append({"name": name, "json_schema": {**schema, "x-guidance": options}})
        return f"@{name}"

    def _text(self, text: str) -> str:
        """Return a text as Lark has it. Marks in it are their tokens."""
        marks = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True)))
        pieces = re.split(f"({marks})", text) if marks else [text]
        written = (
            f"<[{self._tokens[each]}]>" if each in self._tokens else json.dumps(each, ensure_ascii=False)
            for each in pieces
            if each
        )
        return " ".join(written)

    def _up_to(self, name: str, end: str) -> str:
        """Return the name of a rule for free text up to a mark and past it."""
        if end in self._tokens:
            return self._add(name, f"TEXT {self._text(end)}")
        return self._add(f"{name}[lazy]", f"TEXT {self._text(end)}")

    def _reasoning(self, opening: str, closing: str, *, is_open: bool) -> str:
        thought = f"{self._up_to('thought', closing)} SPACE?"
        if is_open:
            return self._add("reasoning", thought)
        return self._add("reasoning", f"SPACE? {self._text(opening)} {thought}") + "?"

    def _text_with(self, triggers: Sequence[_Trigger]) -> str:
        """Return the name of a rule for free text with calls in it."""
        sections = [
            self._add(f"section_{number}", f"{self._up_to(f'head_{number}', trigger.opening)} {trigger.rest}")
            for number, trigger in enumerate(triggers)
        ]
        return self._add("text", f"({' | '.join(sections)})* TEXT")

    def _any_of(self, name: str, rules: Sequence[str]) -> str:
        return self._add(name, " | ".join(rules))

    def _objects(self, tools: Sequence[Tool], key: str) -> str:
        """Return the name of a rule for `{"name": …, key: {…}}` of any of the tools."""
        rules = []
        for tool in tools:
            # The pieces are those of JSON in the form: the lexer would not go back from a longer one.
            name, argument = json.dumps(f'"{tool.name}"'), json.dumps(f'"{key}"')
            value = self._schema(tool.parameters, tool)
            rules.append(f'"{{" "\\"name\\"" COLON {name} COMMA {argument} COLON {value} "}}"')
        return self._any_of("object", rules)

    # One method for each format: the rule of all calls, or what opens them anywhere.

    def _json_list(self, tools: Sequence[Tool], has_one: bool) -> str:
        call = self._objects(tools, "parameters")
        return f'"[" {call} "]"' if has_one else f'"[" {call} (COMMA {call})* "]"'

    def _hermes(self, tools: Sequence[Tool], has_one: bool) -> list[_Trigger]:
        call = self._objects(tools, "arguments")
        return [_Trigger("<tool_call>", f"SPACE? {call} SPACE? {self._text('</tool_call>')}")]

    def _llama3_json(self, tools: Sequence[Tool], has_one: bool) -> str:
        call = self._objects(tools, "parameters")
        more = "" if has_one else f' (SPACE? ";" SPACE? {call})*'
        return f"({self._text('<|python_tag|>')} SPACE?)? {call}{more}"

    def _mistral(self, tools: Sequence[Tool], has_one: bool) -> list[_Trigger]:
        objects = self._objects(tools, "arguments")
        more = "" if has_one else f" (COMMA {objects})*"
        rests = [f'SPACE? "[" {objects}{more} "]"']
        if "[ARGS]" in self._tokens:
            rests += [
                f"{self._text(f'{tool.name}[ARGS]')} {self._schema(tool.parameters, tool)}" for tool in tools
            ]
        return [_Trigger("[TOOL_CALLS]", self._any_of("rest", rests))]

    def _deepseek(self, tools: Sequence[Tool], has_one: bool) -> list[_Trigger]:
        rules = []
        for tool in tools:
            parameters = self._schema(tool.parameters, tool)
            rules.append(f"{self._text(f'{tool.name}<｜tool▁sep｜>')} {parameters}")
            fenced = self._text(f"function<｜tool▁sep｜>{tool.name}\n```json\n")
            rules.append(f'{fenced} {parameters} "\\n```"')
        body = self._any_of("body", rules)
        call = self._add(
            "one_call",
            f"{self._text('<｜tool▁call▁begin｜>')} {body} SPACE? {self._text('<｜tool▁call▁end｜>')}",
        )
        more = "" if has_one else f" (SPACE? {call})*"
        rest = f"SPACE? {call}{more} SPACE? {self._text('<｜tool▁calls▁end｜>')}"
        return [_Trigger("<｜tool▁calls▁begin｜>", rest)]

    def _pythonic(self, tools: Sequence[Tool], has_one: bool) -> str:
        calls = [
            f'{self._text(f"{tool.name}(")} {self._keywords(number, tool)} ")"'
            for number, tool in enumerate(tools)
        ]
        call = self._any_of("keyword_call", calls)
        return f'"[" {call} "]"' if has_one else f'"[" {call} (COMMA {call})* "]"'

    def _keywords(self, number: int, tool: Tool) -> str:
        """Return the name of a rule for `a=1, b="x"`: in the order of the schema, the optional ones or not."""
        first, later = f"keywords_{number}_0_", f"keywords_{number}_1_"
        properties, required = _declared(tool.parameters)
        for place, (name, schema) in enumerate(properties):
            value = (
                f"{self._text(f'{name}=')} {self._schema(_with_definitions(schema, tool.parameters), tool)}"
            )
            may_skip = name not in required
            for rule, comma in ((first, ""), (later, "COMMA ")):
                skipped = f" | {rule}{place + 1}" if may_skip else ""
                self._add(f"{rule}{place}", f"{comma}{value} {later}{place + 1}{skipped}")
        for rule in (first, later):
            self._add(f"{rule}{len(properties)}", '""')
        return f"{first}0"

    def _qwen3_coder(self, tools: Sequence[Tool], has_one: bool) -> list[_Trigger]:
        functions = [
            f'{self._text(f"{tool.name}>")} SPACE? {self._parameters(number, tool)} "</function>"'
            for number, tool in enumerate(tools)
        ]
        function = self._any_of("function", functions)
        return [
            _Trigger("<tool_call>", f'SPACE? "<function=" {function} SPACE? {self._text("</tool_call>")}'),
            _Trigger("<function=", function),
        ]

    def _parameters(self, number: int, tool: Tool) -> str:
        """Return a rule for `<parameter=a>1</parameter> …` in the order of the schema."""
        properties, required = _declared(tool.parameters)
        rules = []
        for place, (name, schema) in enumerate(properties):
            value = self._parameter(f"value_{number}_{place}", schema, tool)
            rule = self._add(
                f"parameter_{number}_{place}", f"{self._text(f'<parameter={name}>')} {value} SPACE?"
            )
            rules.append(rule if name in required else f"{rule}?")
            limits = [each for each in _TEXT_LIMITS if each in schema and _may_be_text(schema)]
            self.not_enforced += [(number, f"properties.{name}.{each}") for each in limits]
        return " ".join(rules)

    def _parameter(self, name: str, schema: Mapping[str, Any], tool: Tool) -> str:
        """Return a rule for a value and its closing. Texts are written without quotes."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values and all(isinstance(value, str) and value for value in values):
            words = " | ".join(map(self._text, values))
            return f'SPACE? ({words}) SPACE? "</parameter>"'
        if _may_be_text(_followed(schema, tool.parameters)):
            return self._up_to(name, "</parameter>")
        return (
            f'SPACE? {self._schema(_with_definitions(schema, tool.parameters), tool)} SPACE? "</parameter>"'
        )


_FORMATS: Mapping[str, Callable[[AnswerGrammar, Sequence[Tool], bool], str | list[_Trigger]]] = {
    "json_list": AnswerGrammar._json_list,
    "hermes": AnswerGrammar._hermes,
    "llama3_json": AnswerGrammar._llama3_json,
    "mistral": AnswerGrammar._mistral,
    "deepseek": AnswerGrammar._deepseek,
    "pythonic": AnswerGrammar._pythonic,
    "qwen3_coder": AnswerGrammar._qwen3_coder,
}
"""Name of a format in `tool_formats` -> its rules."""
_PLAIN = {
    "llama3_json": r"PLAIN: /[ \t\r\n]*([^ \t\r\n{](.|\n)*)?/",
    "pythonic": r"PLAIN: /[ \t\r\n]*([^ \t\r\n\[](.|\n)*)?/",
}
"""Format whose calls begin an answer -> free text that does not begin like one."""


def _declared(parameters: Mapping[str, Any]) -> tuple[list[tuple[str, Mapping[str, Any]]], frozenset[str]]:
    """Return the properties that a schema declares, and those that must be given."""
    properties, required = parameters.get("properties"), parameters.get("required")
    declared = properties.items() if isinstance(properties, Mapping) else ()
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return [(name, part if isinstance(part, Mapping) else {}) for name, part in declared], frozenset(names)


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with what it may refer to."""
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **schema}


def _followed(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a part of a schema refers to, or the part itself."""
    place, _, name = str(schema.get("$ref", "")).removeprefix("#/").partition("/")
    definitions = root.get(place) if place in ("$defs", "definitions") else None
    found = definitions.get(name) if isinstance(definitions, Mapping) else None
    return found if isinstance(found, Mapping) else schema


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a value may be a text, as far as the schema itself says."""
    kinds = schema.get("type")
    if isinstance(kinds, (str, list)):
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    branches = [
        part for name in ("anyOf", "oneOf") for part in schema.get(name) or () if isinstance(part, Mapping)
    ]
    return (
        any(map(_may_be_text, branches))
        if branches
        else not schema.keys() & {"enum", "const", "$ref", "allOf"}
    )
