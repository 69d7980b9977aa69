"""How models write calls of tools and reasoning: one declaration per format, and how each is read.

To add a format, write a reader and list it in `TOOL_FORMATS`. Readers are generators, see `answer_text.AnswerText`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from triptych.text.answer_parser import CallWriter, ReasoningFormat, ToolCallFormat
from triptych.text.answer_text import (
    AnswerEndedError,
    AnswerText,
    Reading,
    decoded,
    longest_beginning,
    take_balanced,
    take_string,
    take_while,
)
from triptych.text.json_mending import MalformedCallError, mended_object

_TOO_MANY = re.compile(r"[\s\]},;]")
_CONSTANTS = {"true": True, "false": False, "null": None}


def _read_object(text: AnswerText, calls: CallWriter, *, is_nested: bool = False) -> Reading[None]:
    """Read `{"name": "add", "arguments": {"a": 1}}`, from behind the brace; the keys in any order.

    Behind the arguments, whatever is no JSON ends the object: small models forget braces.
    """
    try:
        yield from _read_members(text, calls, is_nested=is_nested)
    except MalformedCallError:
        if not calls.is_open:
            raise
        text.rewind()


def _read_members(text: AnswerText, calls: CallWriter, *, is_nested: bool) -> Reading[None]:
    name = arguments = None
    while True:
        yield from text.skip_space()
        if (yield from text.take_if("}")):
            break
        key = yield from take_string(text)
        yield from text.skip_space()
        yield from text.expect(":")
        yield from text.skip_space()
        opens = (yield from text.peek()) == "{"
        if key == "name" and name is None:
            name = yield from take_string(text)
        elif key == "function" and opens and not is_nested and name is None:
            text.take(1)
            yield from _read_object(text, calls, is_nested=True)
        elif key in ("arguments", "parameters") and arguments is None:
            if opens and name is not None and not calls.is_open:
                calls.begin(name)
                arguments = yield from text.take_value(calls.add)
            else:
                arguments = _arguments_of((yield from text.take_value()))
        else:
            yield from text.take_value()
        yield from text.skip_space()
        if not (yield from text.take_if(",")) and (yield from text.peek()) not in "\"'":
            yield from text.expect("}")
            break
    if calls.is_open:
        return
    if not name:
        raise MalformedCallError
    calls.begin(name)
    calls.add("{}" if arguments is None else arguments)


def _arguments_of(value: str) -> str:
    """Return the JSON object that arguments mean: themselves, that in a text of JSON, or an empty one."""
    if value.lstrip().startswith("{"):
        return value
    content = decoded(value)
    if content is None or (isinstance(content, str) and content.strip() in ("", "null")):
        return "{}"
    if not isinstance(content, str):
        raise MalformedCallError
    return mended_object(content)


def _read_objects(text: AnswerText, calls: CallWriter, opening: str, closing: str) -> Reading[None]:
    """Read calls from behind an opening up to its closing, which a model may forget.

    Another object or another opening is the next call. Brackets and commas too many are passed over. Anything else is
    content.
    """
    yield from text.skip_space()
    if (yield from text.take_if("[")):
        yield from text.skip_space()
    yield from text.expect("{")
    while True:
        yield from _read_object(text, calls)
        calls.end()
        yield from text.skip(_TOO_MANY)
        if text.is_exhausted or (yield from text.take_begun(closing)):
            return
        if (yield from text.take_if(opening)):
            yield from text.skip_space()
        if not (yield from text.take_if("{")):
            return text.rewind()


def _read_hermes(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`"""
    yield from _read_objects(text, calls, opening, "</tool_call>")


def _read_llama3_json(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`{"name": …, "parameters": {…}}`, several with `;` between them, perhaps behind `<|python_tag|>`."""
    if opening != "{":
        yield from text.skip_space()
        yield from text.expect("{")
    while True:
        yield from _read_object(text, calls)
        calls.end()
        yield from text.skip_space()
        has_separator = (yield from text.take_if(";")) or (yield from text.take_if(","))
        yield from text.skip_space()
        if not (yield from text.take_if("{")):
            return None if has_separator and text.is_exhausted else text.rewind()


def _read_list(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`[{"name": …, "parameters": {…}}, …]`, from behind the bracket."""
    while True:
        yield from text.skip_space()
        yield from text.expect("{")
        yield from _read_object(text, calls)
        calls.end()
        yield from text.skip_space()
        if not (yield from text.take_if(",")):
            yield from text.expect("]")
            return
        yield from text.skip_space()
        if (yield from text.take_if("]")):
            return


def _read_mistral(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or since version 11 `[TOOL_CALLS]name[ARGS]{…}`."""
    yield from text.skip_space()
    if (yield from text.take_if("[")):
        return (yield from _read_list(text, calls, "["))
    name = (yield from take_while(text, lambda character: character not in "[{\n")).strip()
    if not name:
        raise MalformedCallError
    if (yield from text.take_if("[CALL_ID]")):
        yield from text.take_until("[ARGS]")
    else:
        yield from text.take_if("[ARGS]")
    yield from text.skip_space()
    yield from _read_arguments(text, calls, name)


def _read_arguments(text: AnswerText, calls: CallWriter, name: str) -> Reading[None]:
    """Read the arguments of a call that is known by its name."""
    if (yield from text.peek()) == "{":
        calls.begin(name)
        yield from text.take_value(calls.add)
    else:
        arguments = _arguments_of((yield from text.take_value()))
        calls.begin(name)
        calls.add(arguments)


def _read_deepseek(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """Calls of version 3, `function<sep>name`, then JSON in a fence, or since 3.1 `name<sep>{…}`."""
    while True:
        yield from text.skip_space()
        if (yield from text.take_if("<｜tool▁calls▁end｜>")):
            return
        yield from text.expect("<｜tool▁call▁begin｜>")
        name = (yield from text.take_until("<｜tool▁sep｜>")).strip()
        yield from text.skip_space()
        if not (yield from text.starts_with("{")) and name == "function":
            name = (yield from text.take_until("\n")).strip()
            yield from text.skip_space()
            yield from text.take_if("```json")
            yield from text.skip_space()
        if not name:
            raise MalformedCallError
        yield from _read_arguments(text, calls, name)
        calls.end()
        yield from text.skip(_TOO_MANY)
        yield from text.take_if("```")
        yield from text.skip_space()
        yield from text.take_begun("<｜tool▁call▁end｜>")
        calls.end()


def _read_qwen3_coder(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`; values are no JSON."""
    if opening == "<tool_call>":
        yield from text.skip_space()
        yield from text.expect("<function=")
    name = (yield from text.take_until(">")).strip()
    if not name or "<" in name:
        raise MalformedCallError
    calls.begin(name)
    yield from text.skip_space()
    if (yield from text.starts_with("{")):  # the model has mixed up the formats
        yield from text.take_value(calls.add)
    else:
        yield from _read_parameters(text, calls, name)
    calls.end()
    yield from text.skip_space()
    yield from text.take_begun("</function>")
    text.forget()
    yield from text.skip_space()
    if not (yield from text.take_begun("</tool_call>")):
        text.rewind()


def _read_parameters(text: AnswerText, calls: CallWriter, name: str) -> Reading[None]:
    """Read the parameters of a call, and add them as one JSON object; it is closed if the answer ends."""
    separator = "{"
    try:
        while True:
            yield from text.skip_space()
            if not (yield from text.take_begun("<parameter=")):
                break
            key = (yield from text.take_until(">")).strip()
            value = yield from _take_parameter(text)
            typed = _value_of(value, calls.parameter(name, key))
            calls.add(
                f"{separator}{json.dumps(key, ensure_ascii=False)}: {json.dumps(typed, ensure_ascii=False)}"
            )
            separator = ", "
    except AnswerEndedError:
        text.is_cut = True
    calls.add("{}" if separator == "{" else "}")


def _take_parameter(text: AnswerText) -> Reading[str]:
    """Read a value and its closing, which a model may forget; return the value."""
    ends = ("</parameter>", "<parameter=", "</tool_call>")
    try:
        value, end = yield from text.take_until_any(ends)
    except AnswerEndedError:
        value, end = text.take_all(), ""
        value = value[: len(value) - longest_beginning(value, (*ends, "</function>"))]
    if end != "</parameter>":
        whole, closing, rest = value.partition("</function>")
        text.unread_last(len(end) + len(closing) + len(rest))
        value = whole
    return value.removeprefix("\n").removesuffix("\n")


def _value_of(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value that is written without quotes: a string, unless the schema says otherwise."""
    kinds = schema.get("type", "string" if not schema else None)
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_pythonic(text: AnswerText, calls: CallWriter, opening: str) -> Reading[None]:
    """`[add(a=1, b=2), …]`"""
    while True:
        yield from text.skip_space()
        name = yield from take_while(text, lambda character: character.isalnum() or character in "_.-")
        yield from text.expect("(")
        arguments = _keywords((yield from take_balanced(text)))
        calls.begin(name)
        calls.add(arguments)
        calls.end()
        yield from text.skip_space()
        if not (yield from text.take_if(",")):
            yield from text.expect("]")
            return


def _keywords(text: str) -> str:
    """Return what is between the parentheses of a Python call, all of it by keyword, as JSON."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            raise MalformedCallError
        return json.dumps({str(each.arg): _literal(each.value) for each in call.keywords}, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_literal(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {
                ast.literal_eval(key): _literal(value)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise MalformedCallError
    return value


JSON_LIST = ToolCallFormat("json_list", _read_list, openings_at_start=("[",), is_all=True)
"""The format of calls that a request demands: the grammar sees to it, not the model."""

TOOL_FORMATS: Mapping[str, ToolCallFormat] = {
    each.name: each
    for each in (
        # in the order in which chat templates are looked at
        ToolCallFormat(
            "qwen3_coder",
            _read_qwen3_coder,
            openings=("<tool_call>", "<function="),
            template_marks=("<function=",),
        ),
        ToolCallFormat("hermes", _read_hermes, openings=("<tool_call>",), template_marks=("<tool_call>",)),
        ToolCallFormat(
            "mistral",
            _read_mistral,
            openings=("[TOOL_CALLS]",),
            has_special_tokens=True,
            template_marks=("[TOOL_CALLS]",),
            short_ids=True,
        ),
        ToolCallFormat(
            "deepseek",
            _read_deepseek,
            openings=("<｜tool▁calls▁begin｜>",),
            has_special_tokens=True,
            template_marks=("<｜tool▁calls▁begin｜>",),
        ),
        ToolCallFormat(
            "llama3_json",
            _read_llama3_json,
            openings=("<|python_tag|>",),
            openings_at_start=("{",),
            has_special_tokens=True,
            template_marks=("<|python_tag|>", '{"name": function name, "parameters":'),
        ),
        ToolCallFormat(
            "pythonic",
            _read_pythonic,
            openings_at_start=("[",),
            template_marks=("[func_name1(params_name1=",),
        ),
    )
}
"""Name of a format -> the format."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", has_special_tokens=True),
    )
}
"""Name of a format -> the format."""


def choose_tool_format(name: str, chat_template: str) -> ToolCallFormat | None:
    """Return the format of this name; `auto`: the one that the template shows, `none`: none."""
    return find_tool_format(chat_template) if name == "auto" else TOOL_FORMATS.get(name)


def choose_reasoning_format(name: str, chat_template: str) -> ReasoningFormat | None:
    """Return the format of this name; `auto`: the one that the template shows, `none`: none."""
    return find_reasoning_format(chat_template) if name == "auto" else REASONING_FORMATS.get(name)


def find_tool_format(chat_template: str) -> ToolCallFormat | None:
    """Return the format that a chat template shows to the model, or None if it shows none that is known."""
    for each in TOOL_FORMATS.values():
        if any(mark in chat_template for mark in each.template_marks):
            return each
    return None


def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template writes, or None if it writes none that is known."""
    for each in REASONING_FORMATS.values():
        if each.closing in chat_template:
            return each
    return None
