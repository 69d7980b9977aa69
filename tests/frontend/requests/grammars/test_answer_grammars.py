"""Grammars of whole answers: reasoning, a form or calls, in each format; what they allow is what the parser reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from tests.helpers.byte_tokenizer import EOS, byte_backend
from tests.helpers.fake_engine import MODEL
from triptych.errors import InvalidRequest
from triptych.text.answer_parser import AnswerParser
from triptych.text.tokenizer import Tokenizer
from triptych.text.tool_formats import JSON_LIST, REASONING_FORMATS, TOOL_FORMATS
from triptych.types.structured import StructuredOutputs
from triptych_services.frontend.requests.grammars.answer_forms import AnswerForm, ToolForm, answer_form
from triptych_services.frontend.requests.grammars.compiler import GrammarChecker
from triptych_services.frontend.requests.raw import RawChat
from triptych_services.frontend.requests.tools import AnswerSplit

FORMATS = {**TOOL_FORMATS, JSON_LIST.name: JSON_LIST}
FORM = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
GO = {
    "type": "object",
    "properties": {
        "to": {"$ref": "#/$defs/Place"},
        "fast": {"type": "boolean"},
        "why": {"type": "string"},
        "by": {"enum": ["car", "foot"]},
    },
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
TOOLS = (
    ToolForm(0, "go", json.dumps(GO), is_strict=True),
    ToolForm(
        1, "now", '{"type": "object", "properties": {}, "additionalProperties": false}', is_strict=False
    ),
)
ARGUMENTS = {"to": {"x": 3}, "fast": True, "why": "it's <late>", "by": "foot"}
WRITTEN = '{"to": {"x": 3}, "fast": true, "why": "it\'s <late>", "by": "foot"}'
COMPACT = json.dumps(ARGUMENTS, separators=(",", ":"))
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "go", "arguments": {WRITTEN}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=go>\n<parameter=to>\n{\"x\": 3}\n</parameter>\n<parameter=fast>\ntrue\n"
    "</parameter>\n<parameter=why>\nit's <late>\n</parameter>\n<parameter=by>\nfoot\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "go", "arguments": {WRITTEN}}}, {{"name": "now", "arguments": {{}}}}]',
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{WRITTEN}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama3_json": f'{{"name": "go", "parameters": {WRITTEN}}}; {{"name": "now", "parameters": {{}}}}',
    "pythonic": '[go(to={"x": 3}, fast=true, why="it\'s <late>", by="foot"), now()]',
    "json_list": f'[{{"name":"go","parameters":{COMPACT}}},{{"name":"now","parameters":{{}}}}]',
}  # fmt: skip
NEWER_MISTRAL = f"[TOOL_CALLS]go[ARGS]{WRITTEN}[TOOL_CALLS]now[ARGS]{{}}"
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
           "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")  # fmt: skip


def marked_tokenizer() -> Tokenizer:
    """One token for each mark, as models that know the formats have."""
    backend = byte_backend()
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    return Tokenizer(backend, {})


class Judge:
    """Says which texts the grammar of an answer allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        eos = tokenizer.token_id(EOS)
        assert eos is not None
        self._tokenizer = tokenizer
        self.facts = replace(MODEL, vocab_size=tokenizer.vocab_size, eos_token_ids=(eos,))
        self._checker = GrammarChecker(tokenizer)
        self._backend = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=[eos])
        self.not_enforced: tuple[str, ...] = ()

    async def matcher(self, form: AnswerForm) -> LLMatcher:
        form_, self.not_enforced = await self._checker.compile(form, self.facts, str)
        assert form_.grammar is not None
        return LLMatcher(self._backend, form_.grammar, log_level=0)

    def allows(self, matcher: LLMatcher, text: str) -> bool:
        """Return whether a text is a whole answer."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        matcher = matcher.deep_copy()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=["tokens", "text"])
def judge(request: pytest.FixtureRequest) -> Judge:
    """The marks are tokens of their own, or text."""
    return Judge(marked_tokenizer() if request.param == "tokens" else Tokenizer(byte_backend(), {}))


def read(format: str, text: str, *, is_either: bool) -> tuple[str, list[tuple[str, Any]]]:
    """Return content and calls as the parser reads them."""
    schemas = {tool.name: json.loads(tool.parameters) for tool in TOOLS}
    parser = AnswerParser(tool_format=FORMATS[format], tools=schemas, is_either=is_either)
    parser.push(text)
    parser.finish()
    parts, calls = parser.take(), list[list[str]]()
    for delta in parts.tool_calls:
        if delta.name:
            calls.append([delta.name, ""])
        calls[-1][1] += delta.arguments
    return parts.content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("format", CALLS)
async def test_calls_are_allowed_as_they_are_read(judge: Judge, format: str) -> None:
    matcher = await judge.matcher(AnswerForm(FORM, TOOLS, format))
    text = CALLS[format]
    assert read(format, text, is_either=True) == ("", [("go", ARGUMENTS), ("now", {})])
    assert judge.allows(matcher, text)
    assert judge.allows(matcher, '{"n":3}'), "or the form"
    for wrong in ("", "Hello", '{"n":"3"}', text + "x", text[:-1], '{"n":3}' + text, "Hello " + text):
        assert not judge.allows(matcher, wrong), wrong
    for before, after in (("go", "stop"), ('"x": 3', '"x": "3"'), ("fast", "slow"), ("foot", "rail")):
        if format == "json_list":
            before, after = before.replace(" ", ""), after.replace(" ", "")
        assert before in text
        assert not judge.allows(matcher, text.replace(before, after)), after


async def test_newer_models_of_mistral_write_names_without_json(judge: Judge) -> None:
    matcher = await judge.matcher(AnswerForm(FORM, TOOLS, "mistral"))
    is_token = judge.facts.vocab_size > Tokenizer(byte_backend(), {}).vocab_size
    assert judge.allows(matcher, NEWER_MISTRAL) is is_token


@pytest.mark.parametrize("format", CALLS)
async def test_one_call_is_allowed_where_there_may_be_one(judge: Judge, format: str) -> None:
    matcher = await judge.matcher(AnswerForm(None, TOOLS, format, has_one=True))
    assert not judge.allows(matcher, CALLS[format])
    assert not judge.allows(matcher, '{"n":3}')


@pytest.mark.parametrize("format", [name for name in CALLS if name != "json_list"])
async def test_text_is_free_beside_strict_calls(judge: Judge, format: str) -> None:
    matcher = await judge.matcher(AnswerForm(None, TOOLS, format, has_text=True))
    text = CALLS[format]
    for good in ("", "Hello <b>\n\nyou</b>", text):
        assert judge.allows(matcher, good), good
    if TOOL_FORMATS[format].openings and format != "llama3_json":
        assert judge.allows(matcher, f"One moment. {text}\nDone.")
        assert read(format, f"One moment. {text}\nDone.", is_either=False)[0] == "One moment.Done."
    for before, after in (("go", "stop"), ('"x": 3', '"x": "3"'), ("fast", "slow")):
        assert not judge.allows(matcher, text.replace(before, after)), after


@pytest.mark.parametrize("format", ["hermes", "json_list"])
async def test_reasoning_is_free_and_comes_first(judge: Judge, format: str) -> None:
    think = REASONING_FORMATS["think"]
    form = AnswerForm(FORM, TOOLS, format, reasoning=(think.opening, think.closing))
    closed, opened = await judge.matcher(form), await judge.matcher(replace(form, is_reasoning=True))
    thought = 'Shall I <b>go</b>? {"n": 3}</thin'
    for answer in ('{"n":3}', CALLS[format]):
        assert judge.allows(closed, f"<think>\n{thought}\n</think>\n\n{answer}")
        assert judge.allows(closed, answer)
        assert judge.allows(opened, f"{thought}</think>{answer}")
        assert not judge.allows(opened, answer)
        assert not judge.allows(closed, f"{thought}</think>{answer}")
    assert not judge.allows(closed, "<think>x</think>y")
    assert not judge.allows(closed, "<think>x")


async def test_a_form_of_any_kind_may_stand_beside_calls(judge: Judge) -> None:
    for form, good, bad in (
        (StructuredOutputs(regex="[0-9]{2}"), "42", "4"),
        (StructuredOutputs(choice=["yes", "no"]), "no", "nay"),
        (StructuredOutputs(grammar='?start: "a" tail\n!tail: "b"*'), "abb", "ba"),
        (StructuredOutputs(grammar='root ::= "a" "b"*'), "abb", "ba"),
        (StructuredOutputs(json_object=True), "{}", "[]"),
    ):
        matcher = await judge.matcher(AnswerForm(form, TOOLS, "hermes"))
        for text, is_good in ((good, True), (bad, False), (CALLS["hermes"], True)):
            assert judge.allows(matcher, text) is is_good, text


async def test_what_cannot_be_enforced_is_refused_by_its_part() -> None:
    def path_of(name: str) -> str:
        return {"tools.function": ".function"}.get(name, name)

    judge = Judge(marked_tokenizer())
    bad = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    impossible = json.dumps({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]})
    for form, tool, path in (
        (StructuredOutputs(json=bad), TOOLS[0], "structured_outputs"),
        (FORM, ToolForm(5, "a", bad, is_strict=True), "tools[5].function.parameters"),
        (FORM, ToolForm(5, "a", impossible, is_strict=False), "tools[5].function.parameters"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
                await judge._checker.compile(
                    AnswerForm(form, (TOOLS[1], tool), "hermes"), judge.facts, path_of
                )
            assert [violation.field for violation in caught.value.violations] == [path]
    await judge.matcher(
        AnswerForm(replace(FORM, json=bad, strict=False), (ToolForm(5, "a", bad, False),), "hermes")
    )
    assert judge.not_enforced == (
        "structured_outputs.properties.a.uniqueItems",
        "tools[5]tools.function.parameters.properties.a.uniqueItems",
    )


def split_by(format: str | None, reasoning: str | None = None) -> AnswerSplit:
    return AnswerSplit(
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        is_reasoning=False,
        tool_format=FORMATS[format] if format else None,
        tools={},
        max_calls=None,
        sends_reasoning=True,
    )


def test_answers_have_a_form_where_something_demands_one() -> None:
    def tool(name: str, **fields: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **fields}}

    loose = RawChat((), tools=[tool("a"), tool("b", strict=False)])
    strict = replace(loose, tools=[tool("a", strict=True), tool("b")])
    assert answer_form(loose, None, split_by("hermes")) is None
    assert answer_form(loose, FORM, None) is FORM, "nothing stands beside it"
    beside = answer_form(loose, FORM, split_by("hermes"))
    assert isinstance(beside, AnswerForm)
    assert (beside.form, beside.has_text, len(beside.tools)) == (FORM, False, 2)
    free = answer_form(strict, None, split_by("hermes"))
    assert isinstance(free, AnswerForm)
    assert (free.has_text, [tool.is_strict for tool in free.tools]) == (True, [True, False])
    thinking = answer_form(RawChat(()), FORM, split_by(None, "think"))
    assert isinstance(thinking, AnswerForm)
    assert (thinking.form, thinking.tools, thinking.reasoning) == (FORM, (), ("<think>", "</think>"))
    for choice, names in (("required", ["a", "b"]), ("b", ["b"])):
        demanded = answer_form(replace(loose, tool_choice=choice), FORM, split_by("json_list"))
        assert isinstance(demanded, AnswerForm)
        assert (demanded.form, [tool.name for tool in demanded.tools]) == (None, names), (
            "calls win over the form"
        )
        assert demanded.has_one is (choice == "b")
