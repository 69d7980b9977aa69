"""Answers are split into reasoning, content and tool calls, however their text is cut into pieces."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.text.answer_parser import AnswerParser
from triptych.text.tool_formats import (
    JSON_LIST,
    REASONING_FORMATS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
        },
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}

FORMATS = {**TOOL_FORMATS, JSON_LIST.name: JSON_LIST}

Call = tuple[str, Any]


def parse(
    pieces: list[str], *, format: str | None = "hermes", reasoning: str | None = None, **options: Any
) -> tuple[str, str, list[Call], list[int]]:
    """Return reasoning, content, the calls with their arguments as text, and where in the content they stand.

    Each call's parts are checked.
    """
    numbers = count()
    parser = AnswerParser(
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        tool_format=FORMATS[format] if format else None,
        tools=TOOLS,
        new_id=lambda: f"id-{next(numbers)}",
        **options,
    )
    thought = content = ""
    calls: list[list[str]] = []
    offsets: list[int] = []
    for piece in (*pieces, None):
        if piece is None:
            parser.finish()
        else:
            parser.push(piece)
        parts = parser.take()
        thought += parts.reasoning
        content += parts.content
        for delta in parts.tool_calls:
            if delta.name:
                assert delta.index == len(calls)
                assert delta.id == f"id-{delta.index}"
                assert not delta.arguments
                calls.append([delta.name, ""])
                offsets.append(delta.offset)
            else:
                assert delta.index == len(calls) - 1, "calls follow one another"
                assert not delta.id
                calls[-1][1] += delta.arguments
    assert offsets == sorted(offsets)
    assert all(offset <= len(content) for offset in offsets)
    return thought, content, [(name, arguments) for name, arguments in calls], offsets


def decoded(calls: list[Call]) -> list[Call]:
    """Return calls with their arguments decoded, each of which must be a JSON object."""
    decoded = [(name, json.loads(arguments, parse_constant=refuse)) for name, arguments in calls]
    assert all(isinstance(arguments, dict) for _, arguments in decoded), decoded
    return decoded


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


PARIS = ("get_weather", {"city": "Paris", "days": 3})
SUM = ("add", {"a": 1, "b": -2.5})

WHOLE_CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"a": 1, "b": -2.5}, "name": "add"}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
    "<parameter=b>\n-2.5\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "add", "arguments": {"a": 1, "b": -2.5}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": -2.5}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; '
    '{"name": "add", "parameters": {"a": 1, "b": -2.5}}',
    "pythonic": "[get_weather(city='Paris', days=3), add(a=1, b=-2.5)]",
}

ADD = '{"name": "add", "arguments": {"a": 1}}'
NOW = '{"name": "now", "arguments": {}}'
ONE, EMPTY = ("add", {"a": 1}), ("now", {})
LIST_AS_ARGUMENTS = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"

# Calls as small models and long answers write them: (format, text, content, calls)
MALFORMED: list[tuple[str, str, str, list[Call]]] = [
    # closings that are missing, or too many
    ("hermes", f"<tool_call>\n{ADD}\n<tool_call>\n{NOW}\n</tool_call>", "", [ONE, EMPTY]),
    ("hermes", f"<tool_call>\n{ADD}\n{NOW}\n</tool_call>", "", [ONE, EMPTY]),
    ("hermes", f"<tool_call>\n{ADD},\n{NOW}\n</tool_call>\nDone.", "Done.", [ONE, EMPTY]),
    ("hermes", f"<tool_call>\n[{ADD}, {NOW}]\n</tool_call>", "", [ONE, EMPTY]),
    ("hermes", f"<tool_call>\n{ADD}\nI have called it.", "I have called it.", [ONE]),
    ("hermes", f"<tool_call>{ADD}", "", [ONE]),
    ("hermes", f"<tool_call>{ADD}</tool_", "", [ONE]),
    ("hermes", f"<tool_call>\n{ADD}}}\n</tool_call>", "", [ONE]),
    ("hermes", f"<tool_call>\n{ADD}}}", "", [ONE]),
    ("hermes", f"<tool_call>{ADD}}} is it</tool_call>", "} is it</tool_call>", [ONE]),
    ("hermes", f"<tool_call>\n{ADD[:-1]}\n</tool_call>\nDone.", "Done.", [ONE]),
    ("hermes", f"<tool_call>\n{ADD[:-2]}\n</tool_call>\nDone.", "Done.", [ONE]),
    ("hermes", f"<tool_call>{ADD}</tool_call><tool_call>{ADD[:20]}", f"<tool_call>{ADD[:20]}", [ONE]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>", "", [ONE]),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", "", [ONE]),
    ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</function>\nDone.", "Done.", [ONE]),
    ("qwen3_coder", "<function=add><parameter=a>1<parameter=b>2</function>", "", [("add", {"a": 1, "b": 2})]),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</tool_call>Done.", "Done.", [ONE]),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>\n1\n</para", "", [ONE]),
    ("qwen3_coder", "<tool_call><function=add>", "", [("add", {})]),
    ("qwen3_coder", "<tool_call><function=add><param", "", [("add", {})]),
    ("qwen3_coder", '<tool_call><function=add>\n{"a": 1}\n</function></tool_call>', "", [ONE]),
    ("qwen3_coder", "<tool_call><function=add></function><function=now></function></tool_call>.", ".",
     [("add", {}), EMPTY]),
    ("qwen3_coder", "<function=get_weather><parameter=city></function></parameter></function>", "",
     [("get_weather", {"city": "</function>"})]),
    ("deepseek", DEEPSEEK + '{"a": 1}', "", [ONE]),
    ("deepseek", DEEPSEEK + '{"a": 1}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁calls▁end｜>', "", [ONE, EMPTY]),
    ("deepseek", DEEPSEEK + '{"a": 1}\nDone.', "Done.", [ONE]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, ]ok', "ok", [ONE]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}} so', "so", [ONE]),
    ("mistral", "[TOOL_CALLS]now[ARGS]null", "[TOOL_CALLS]now[ARGS]null", []),
    ("mistral", "[TOOL_CALLS]now[ARGS]null\n", "", [EMPTY]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}; {"name": "add", "parameters": {}}', "",
     [ONE, ("add", {})]),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}} so', "so", [ONE]),
    # JSON that is none
    ("hermes", "<tool_call>\n{'name': 'add', 'arguments': {'a': 1}}\n</tool_call>", "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\ny\t"}}</tool_call>', "", [("add", {"a": "x\ny\t"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": True, "b": None}}</tool_call>', "",
     [("add", {"a": True, "b": None})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1 "b": [2,, 3,]}}</tool_call>', "",
     [("add", {"a": 1, "b": [2, 3]})]),
    ("hermes", '<tool_call>{"name": "add" "arguments": {a: 1}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "it\\\'s \\d"}}</tool_call>', "",
     [("add", {"a": "it's \\d"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": .5}}</tool_call>', "",
     [("add", {"a": "NaN", "b": ".5"})]),
    # arguments that are no object
    ("hermes", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', "", [EMPTY]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [EMPTY]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\'a\': 1"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"arguments": None, "name": "now"}</tool_call>', "", [EMPTY]),
    ("hermes", LIST_AS_ARGUMENTS, LIST_AS_ARGUMENTS, []),
    ("hermes", '<tool_call>{"name": "add", "arguments": "soon"}</tool_call>',
     '<tool_call>{"name": "add", "arguments": "soon"}</tool_call>', []),
    # a call in the shape of another API
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [ONE]),
    ("llama3_json", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}', "", [ONE]),
    # cut anywhere
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", {"a": "x"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\\u00', "", [("add", {"a": "x"})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [{"c": -', "", [("add", {"a": 1, "b": [{}]})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": tru', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {', "", [("add", {})]),
    # no calls
    ("hermes", 'You write `<tool_call>` to call. Then {"name"...} follows.',
     'You write `<tool_call>` to call. Then {"name"...} follows.', []),
    ("hermes", f"```json\n{ADD}\n```", f"```json\n{ADD}\n```", []),
    ("llama3_json", f"Sure! {ADD}", f"Sure! {ADD}", []),
    ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', []),
]  # fmt: skip

# Answers of which every part is known: (format, reasoning, text, what is thought, content, names of the calls)
ANSWERS = [
    *((name, None, text, "", "", [PARIS, SUM]) for name, text in WHOLE_CALLS.items()),
    *(
        (name, "think", f"<think>\nHm {{…\n\n</think>\n\nWait.\n\n{text}", "Hm {…", "Wait.", [PARIS, SUM])
        for name, text in WHOLE_CALLS.items()
        if TOOL_FORMATS[name].openings and name != "llama3_json"
    ),
    *(
        (name, "think", f"<think>\nHm\n</think>\n\n{text}", "Hm", "", [PARIS, SUM])
        for name, text in WHOLE_CALLS.items()
    ),
    ("mistral", None, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2.5}[TOOL_CALLS]add[CALL_ID]x9[ARGS]{"a": {"]": 2}}', "", "",
     [SUM, ("add", {"a": {"]": 2}})]),
    ("llama3_json", None, '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": -2.5}}', "", "", [SUM]),
    ("hermes", None, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": -2.5}"}</tool_call>', "", "",
     [SUM]),
    ("hermes", None, '<tool_call>{"name": "add"}</tool_call> after', "", "after", [("add", {})]),
    # a brace is missing
    ("hermes", None, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": -2.5}</tool_call>ok', "", "ok", [SUM]),
    ("hermes", None, '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>{\\"}"}}</tool_call>', "", "",
     [("add", {"a": '</tool_call>{"}'})]),
    ("pythonic", None, "[add(a=[1, {'b': (true, None)}], b='x)]')]", "", "",
     [("add", {"a": [1, {"b": [True, None]}], "b": "x)]"})]),
    ("qwen3_coder", None, "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>", "", "",
     [("get_weather", {"city": "12"})]),
    # no calls
    *((name, "think", "Hello  there\n\n ", "", "Hello  there\n\n ", []) for name in TOOL_FORMATS),
    *((name, None, " \n", "", " \n", []) for name in TOOL_FORMATS),
    ("hermes", None, "a < b <tool_call> c", "", "a < b <tool_call> c", []),
    ("hermes", None, "a\n<tool_call>\n{\"nam", "", "a\n<tool_call>\n{\"nam", []),
    ("hermes", None, '<tool_call>{"name": 3}</tool_call>', "", '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", None, 'x <tool_call>y</tool_call>\n<tool_call>{"name": "add"}</tool_call>', "",
     "x <tool_call>y</tool_call>", [("add", {})]),
    ("llama3_json", None, '{"name": "Ada", "parameters": 3} so', "", '{"name": "Ada", "parameters": 3} so', []),
    ("llama3_json", None, '{"answer": [1, 2]}', "", '{"answer": [1, 2]}', []),
    ("llama3_json", None, '{"name": "add", "parameters": {}}; or so', "", "; or so", [("add", {})]),
    ("pythonic", None, "[1, 2] is a list", "", "[1, 2] is a list", []),
    ("pythonic", None, "[add(1, 2)]", "", "[add(1, 2)]", []),
    ("mistral", None, "[TOOL_CALLS] nothing", "", "[TOOL_CALLS] nothing", []),
    ("deepseek", None, "<｜tool▁calls▁begin｜>x", "", "<｜tool▁calls▁begin｜>x", []),
    *((format, None, text, "", content, calls) for format, text, content, calls in MALFORMED),
    (None, "think", "<think>all of it ", "all of it ", "", []),
    (None, "think", "<thin>", "", "<thin>", []),
    (None, "mistral", "[THINK]a[/THINK]b</think>", "a", "b</think>", []),
]  # fmt: skip


@pytest.mark.parametrize(("format", "reasoning", "text", "thought", "content", "calls"), ANSWERS)
def test_parts_of_an_answer(
    format: str | None, reasoning: str | None, text: str, thought: str, content: str, calls: list[Call]
) -> None:
    parts = parse([text], format=format, reasoning=reasoning)
    assert (parts[0], parts[1], decoded(parts[2])) == (thought, content, calls)


@settings(deadline=None)
@given(data=st.data())
def test_any_split_of_the_text_gives_the_same_parts(data: st.DataObject) -> None:
    format, reasoning, text, *_ = data.draw(st.sampled_from(ANSWERS))
    if data.draw(st.booleans()):  # ends anywhere
        text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text], format=format, reasoning=reasoning)
    assert parse(pieces, format=format, reasoning=reasoning) == whole
    assert parse(list(text), format=format, reasoning=reasoning) == whole


@settings(deadline=None, max_examples=300)
@given(
    format=st.sampled_from(list(TOOL_FORMATS)),
    words=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '"name"',
             ":", ",", '"add"', '"arguments"', "[", "]", "add(", ")", "a=1", " ", "\n", "<function=add>", "x",
             "<parameter=a>", "</parameter>", "</function>", "<|python_tag|>", "<｜tool▁calls▁begin｜>",
             "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\\", "'"]
        ),
        max_size=30,
    ),
)  # fmt: skip
def test_nonsense_is_split_the_same_way(format: str, words: list[str]) -> None:
    text = "".join(words)
    whole = parse([text], format=format, reasoning="think")
    assert parse(words, format=format, reasoning="think") == whole
    assert parse(list(text), format=format, reasoning="think") == whole
    decoded(whole[2])
    if not whole[2] and not text.lstrip().startswith("<think>"):
        assert whole[1] == text, "what holds no call is content as it was written"


def test_calls_begin_as_soon_as_they_are_known() -> None:
    parser = AnswerParser(tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, new_id=lambda: "id")
    parser.push('<tool_call>{"name": "add", "arguments": {"a": "x')
    first, *rest = parser.take().tool_calls
    assert (first.name, "".join(each.arguments for each in rest)) == ("add", '{"a": "x')
    parser.push('yz", "b": 1')
    assert [each.arguments for each in parser.take().tool_calls] == ['yz"'], "a number may go on"
    parser.push("}")
    assert [each.arguments for each in parser.take().tool_calls] == [', "b": 1}']


def test_content_is_passed_on_at_once() -> None:
    parser = AnswerParser(tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, new_id=lambda: "id")
    parser.push("Hello, <b>you</b> <")
    assert parser.take().content == "Hello, <b>you</b>"
    parser.push("i>")
    assert parser.take().content == " <i>"


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    assert parse(["so\n</think>\n\nYes"], format=None, reasoning="think", is_reasoning=True) == (
        "so",
        "Yes",
        [],
        [],
    )


def test_further_calls_are_left_out_on_demand() -> None:
    _, _, calls, _ = parse([WHOLE_CALLS["hermes"]], max_calls=1)
    assert decoded(calls) == [PARIS]


def test_calls_say_where_in_the_content_they_stand() -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    _, content, _, offsets = parse([f"One. {call} Two, {call}{call} three."])
    assert content == "One.Two,three."
    assert offsets == [4, 8, 8]


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
def test_formats_are_found_by_their_templates(name: str) -> None:
    for mark in TOOL_FORMATS[name].template_marks:
        found = find_tool_format(f"{{% if tools %}} … {mark} … {{% endif %}}")
        assert found is TOOL_FORMATS[name]
    assert find_tool_format("{{ messages }}") is None


def test_reasoning_is_found_by_the_template() -> None:
    assert find_reasoning_format("… </think> …") is REASONING_FORMATS["think"]
    assert find_reasoning_format("{{ messages }}") is None


EITHER: list[tuple[str, str, str, list[Call]]] = [
    *((name, text, "", [PARIS, SUM]) for name, text in WHOLE_CALLS.items()),
    *((name, '{"a": "<tool_call>{}"}', '{"a": "<tool_call>{}"}', []) for name in TOOL_FORMATS),
    ("hermes", f"{ADD}<tool_call>{ADD}</tool_call>", f"{ADD}<tool_call>{ADD}</tool_call>", []),
    ("hermes", f"<tool_call>{ADD}</tool_call><tool_call>{ADD[:9]}", "", [ONE]),
    ("hermes", "<tool_call>{", "", []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[AR', "", [ONE]),
    ("qwen3_coder", "<tool_call>\n<func", "", []),
    ("llama3_json", '{"name": "Bob", "par', '{"name": "Bob", "par', []),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"na', "", [ONE]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[add(a=1), no", "", [ONE]),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), EITHER)
def test_an_answer_is_either_calls_or_a_form(format: str, text: str, content: str, calls: list[Call]) -> None:
    parts = parse([text], format=format, is_either=True)
    assert (parts[1], decoded(parts[2])) == (content, calls)
    assert parse(list(text), format=format, is_either=True) == parts


def test_demanded_calls_that_are_cut_leave_no_content() -> None:
    text = '[{"name": "add", "parameters": {"a": "x"}}, {"name": "add", "parameters": {"b": 2}}]'
    for end in range(len(text)):
        _, content, calls, _ = parse([text[:end]], format="json_list")
        assert (content, len(decoded(calls))) == ("", text[:end].count('"parameters": {')), text[:end]
