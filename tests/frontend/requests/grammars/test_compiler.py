"""Forms of outputs at the frontend: what is compiled, what is refused and how, through both APIs."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import httpx
import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from tests.helpers.byte_tokenizer import EOS, byte_backend, byte_tokenizer
from tests.helpers.fake_engine import MODEL, FakeEngine, eventually
from tests.helpers.frontend import frontend_core
from tests.helpers.grpc_api import alphabet, ask, error_of
from tests.helpers.grpc_api import open_api as open_grpc
from tests.helpers.http_api import open_api as open_http
from triptych.client.request import RequestOptions, build_generation
from triptych.errors import FeatureDisabled, InvalidRequest, QueueFull
from triptych.observe.metrics import ChildTotals
from triptych.types.sampling import SamplingParams
from triptych.types.structured import (
    MAX_FORM_BYTES,
    MAX_MASK_ITEMS,
    MAX_TRIED_MASK_S,
    GrammarSyntax,
    StructuredOutputs,
)
from triptych_services.frontend.access.caller import set_tenant
from triptych_services.frontend.offload.limited_process import LimitedProcess, child_totals
from triptych_services.frontend.requests.grammars import grammar_process
from triptych_services.frontend.requests.grammars.compiler import (
    MAX_WAITING_FORMS,
    CompiledForm,
    GrammarChecker,
)

FACTS = replace(MODEL, eos_token_ids=(byte_tokenizer().token_id(EOS),))
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
LARK = 'start: "a" tail\ntail: "b"*'
GBNF = 'root ::= "a" tail\ntail ::= "b"*'
SLOW = "start: R0\n" + "".join(f"R{i}: R{i + 1} | /b{i}/\n" for i in range(3000)) + 'R3000: "a"'
"""Takes a minute to compile."""
TAGS = {
    "structures": [
        {"begin": "<fn=one>", "schema": SCHEMA, "end": "</fn>"},
        {"begin": "<fn=two>", "schema": {"type": "integer"}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}
TRIGGERED_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": TAGS["triggers"],
        "tags": [
            {
                "begin": tag["begin"],
                "content": {"type": "json_schema", "json_schema": tag["schema"]},
                "end": tag["end"],
            }
            for tag in TAGS["structures"]
        ],
    },
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[a-z]+"),
    "choice": StructuredOutputs(choice=["a", 'b"\n', "ä"]),
    "lark": StructuredOutputs(grammar=LARK),
    "gbnf": StructuredOutputs(grammar=GBNF, syntax=GrammarSyntax.GBNF),
    "whitespace": StructuredOutputs(json_object=True, whitespace_pattern=" ?"),
    "structural_tag": StructuredOutputs(structural_tag=TAGS),
}


def form_path(name: str) -> str:
    assert name == "structured_outputs"
    return "form"


def is_good(compiled: CompiledForm) -> bool:
    form = compiled.form
    assert form.syntax is GrammarSyntax.COMPILED
    assert form.grammar is not None
    return not LLMatcher.validate_grammar(form.grammar)


async def test_each_form_is_compiled() -> None:
    checker = GrammarChecker(byte_tokenizer())
    for form in FORMS.values():
        assert is_good(await checker.compile(form, FACTS, form_path))
    again = await checker.compile(StructuredOutputs(json=SCHEMA), FACTS, form_path)
    assert again.form is (await checker.compile(FORMS["json"], FACTS, form_path)).form


@pytest.mark.parametrize(
    "form", [StructuredOutputs(grammar=text) for text in (LARK, f"?{LARK}", f"!{LARK}", GBNF)]
)
async def test_syntax_of_a_grammar_is_found(form: StructuredOutputs) -> None:
    assert is_good(await GrammarChecker(byte_tokenizer()).compile(form, FACTS, form_path))


BAD = {
    "json": [
        StructuredOutputs(json="{"),
        StructuredOutputs(json={"type": "nothing"}),
        StructuredOutputs(json={"not": {"type": "string"}}),
        StructuredOutputs(json={"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
        StructuredOutputs(json={"type": "string", "minLength": 3, "maxLength": 2}),
        StructuredOutputs(json={"$ref": "http://127.0.0.1/schema"}),
        StructuredOutputs(json="[" * 50_000),
    ],
    "regex": [
        StructuredOutputs(regex="("),
        StructuredOutputs(regex="(?=a)b"),
        StructuredOutputs(regex="(" * 40_000),
    ],
    "grammar": [
        StructuredOutputs(grammar="start: missing"),
        StructuredOutputs(grammar=""),
        StructuredOutputs(grammar="root ::= ("),
        StructuredOutputs(grammar="root ::= " + "(" * 40_000),
        StructuredOutputs(grammar="start: " + "(" * 40_000),
    ],
}


@pytest.mark.parametrize("kind", BAD)
async def test_malformed_form_is_refused_by_its_path(kind: str) -> None:
    checker = GrammarChecker(byte_tokenizer())
    for form in BAD[kind]:
        with pytest.raises(InvalidRequest, match=r"^path\.of\.it: cannot be enforced: ") as caught:
            await checker.compile(form, FACTS, lambda _: "path.of.it")
        assert len(str(caught.value)) < 600
    assert is_good(await checker.compile(FORMS[kind if kind != "grammar" else "lark"], FACTS, form_path))


EXPENSIVE = {
    "ambiguous": StructuredOutputs(
        grammar="start: s\ns: T | | " + " | ".join("s " * n for n in range(2, 25)) + "\nT: /[^\\x00]/"
    ),
    "1,800 optional properties": StructuredOutputs(
        json={
            "type": "object",
            "properties": {f"p{i}": {} for i in range(1800)},
            "additionalProperties": False,
        }
    ),
}
NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["name", "children"],
}
LARGE = {
    "recursive": StructuredOutputs(json={"$ref": "#/$defs/node", "$defs": {"node": NODE}}),
    "400 optional properties": StructuredOutputs(
        json={
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(400)},
            "additionalProperties": False,
        }
    ),
    "any json": StructuredOutputs(json={}, any_whitespace=True),
    "5,000 choices": StructuredOutputs(choice=[f"text {i}" for i in range(5000)]),
    "sql": StructuredOutputs(
        grammar="""
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
    ),
}


@pytest.mark.thorough
async def test_forms_whose_masks_are_expensive_are_refused() -> None:
    checker = GrammarChecker(byte_tokenizer())
    for form in EXPENSIVE.values():
        with pytest.raises(InvalidRequest, match=r"^form: cannot be enforced: .*(limit|max)"):
            await checker.compile(form, FACTS, form_path)
    for form in LARGE.values():
        assert is_good(await checker.compile(form, FACTS, form_path))


COMMAS = ('",', "],", "},", '"],', '"},', ',"', '","', '{"', '":', "{}", "[]", '"]', '}"', '["', "]]", "}}")
"""Tokens of usual vocabularies, behind which another property begins, or on the way there."""


@pytest.mark.parametrize("num_properties", [100, 490])
def test_outputs_of_a_wide_object_reach_no_limit(num_properties: int) -> None:
    backend = byte_backend()
    backend.add_tokens([AddedToken(text, normalized=False) for text in COMMAS])
    tokenizer = LLTokenizer(backend.to_str(), eos_token=[backend.token_to_id(EOS)])
    properties: dict[str, object] = {f"p{i}": {} for i in range(num_properties)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})

    def num_failed(max_items: int) -> int:
        trials = grammar_process.Trials.over(tokenizer, max_items, MAX_TRIED_MASK_S)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=trials.limits)
        outputs = [matcher.deep_copy() for _ in range(30)]
        for seed, output in enumerate(outputs):
            grammar_process.begin_output(output, tokenizer, random.Random(seed), trials)
        # Behind the first key all the others may come, which a drawn key leaves half of.
        first = matcher.deep_copy()
        for token_id in backend.encode('{"p0":{},"p1":[],"p2":"').ids:
            first.compute_bitmask()
            first.consume_token(token_id)
        return sum(output.is_error() for output in (first, *outputs))

    assert num_failed(MAX_MASK_ITEMS) == 0
    assert num_failed(10 * num_properties) > 0, "the outputs go where masks take the most"


async def test_rule_that_leads_only_to_itself_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="no text can be derived: a rule leads to nothing but itself"):
        await GrammarChecker(byte_tokenizer()).compile(
            StructuredOutputs(grammar="start: start"), FACTS, form_path
        )


async def test_tokenizer_without_the_end_token_serves_no_forms() -> None:
    assert MODEL.eos_token_ids[0] >= byte_tokenizer().vocab_size
    with pytest.raises(FeatureDisabled, match=r"^form: the tokenizer .*299"):
        await GrammarChecker(byte_tokenizer()).compile(FORMS["regex"], MODEL, form_path)


async def test_form_that_compiles_too_long_is_refused() -> None:
    checker = GrammarChecker(byte_tokenizer(), limit_s=1.0)
    with pytest.raises(
        InvalidRequest, match=r"^form: takes longer to compile than the limit of 1 s of CPU time"
    ):
        await checker.compile(StructuredOutputs(grammar=SLOW), FACTS, form_path)
    assert is_good(await checker.compile(FORMS["regex"], FACTS, form_path))


async def test_refused_forms_are_remembered() -> None:
    checker = GrammarChecker(byte_tokenizer(), limit_s=1.0)
    await checker.compile(FORMS["regex"], FACTS, form_path)
    bad = {
        r"takes longer to compile": StructuredOutputs(grammar=SLOW),
        r"cannot be enforced": StructuredOutputs(regex="("),
    }
    for why, form in bad.items():
        with pytest.raises(InvalidRequest, match=rf"^form: {why}"):
            await checker.compile(form, FACTS, form_path)
    known = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedProcess, "ask", lambda *args: pytest.fail("it was asked again"))
        for why, form in bad.items():
            with pytest.raises(InvalidRequest, match=rf"^other\.path: {why}"):
                await checker.compile(form, FACTS, lambda _: "other.path")
    assert set(psutil.Process().children()) <= known  # of other tests some may end meanwhile


async def test_compilations_are_counted_by_outcome() -> None:
    def since(before: dict[str, ChildTotals]) -> dict[str, int]:
        first = before["grammar"].outcomes if "grammar" in before else dict[str, int]()
        outcomes = child_totals()["grammar"].outcomes
        return {
            name: count - first.get(name, 0) for name, count in outcomes.items() if count > first.get(name, 0)
        }

    before = child_totals()
    checker = GrammarChecker(byte_tokenizer(), limit_s=1.0)
    await checker.compile(FORMS["regex"], FACTS, form_path)
    await checker.compile(FORMS["regex"], FACTS, form_path)  # it is known
    assert since(before) == {"started": 1, "done": 1}
    with pytest.raises(InvalidRequest):
        await checker.compile(StructuredOutputs(regex="("), FACTS, form_path)
    assert since(before) == {"started": 1, "done": 1, "refused": 1}
    cpu_s = child_totals()["grammar"].cpu_s
    with pytest.raises(InvalidRequest):
        await checker.compile(StructuredOutputs(grammar=SLOW), FACTS, form_path)
    assert since(before) == {"started": 1, "done": 1, "refused": 1, "late": 1}
    assert child_totals()["grammar"].cpu_s >= cpu_s + 1.0


async def test_slow_forms_of_one_tenant_do_not_hold_those_of_another() -> None:
    checker = GrammarChecker(byte_tokenizer(), limit_s=60.0)

    async def compile_slowly(number: int) -> None:
        set_tenant("slow")
        await checker.compile(StructuredOutputs(grammar=f"{SLOW}\n// {number}"), FACTS, form_path)

    known = set(psutil.Process().children())
    slow = [asyncio.create_task(compile_slowly(number)) for number in range(3)]
    (process,) = await eventually(lambda: set(psutil.Process().children()) - known)
    set_tenant("other")
    for name in ("regex", "json", "choice"):
        assert is_good(await checker.compile(FORMS[name], FACTS, form_path))
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    process.kill()


async def test_one_tenant_s_forms_wait_within_a_bound() -> None:
    checker = GrammarChecker(byte_tokenizer())
    forms = [StructuredOutputs(regex=f"a{{{number}}}") for number in range(MAX_WAITING_FORMS + 2)]
    tasks = [asyncio.create_task(checker.compile(form, FACTS, form_path)) for form in forms]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results].count(QueueFull) == 1
    assert isinstance(results[-1], QueueFull)


async def test_crash_of_the_compiler_refuses_one_form() -> None:
    checker = GrammarChecker(byte_tokenizer(), limit_s=60.0)
    known = set(psutil.Process().children())
    await checker.compile(FORMS["regex"], FACTS, form_path)
    (first,) = set(psutil.Process().children()) - known
    before = first.cpu_times().user
    task = asyncio.create_task(checker.compile(StructuredOutputs(grammar=SLOW), FACTS, form_path))
    await eventually(lambda: first.cpu_times().user > before)
    first.kill()
    # another process tries it again: the first may have ended for a reason of its own
    (second,) = await eventually(lambda: set(psutil.Process().children()) - known - {first})
    await eventually(lambda: second.cpu_times().user > before + 0.4)  # it has started, and compiles
    second.kill()
    with pytest.raises(InvalidRequest, match=r"^form: is too complex to compile"):
        await task
    assert is_good(await checker.compile(FORMS["choice"], FACTS, form_path))


async def test_compiler_that_has_ended_meanwhile_is_started_again() -> None:
    checker = GrammarChecker(byte_tokenizer())
    known = set(psutil.Process().children())
    await checker.compile(FORMS["regex"], FACTS, form_path)
    (process,) = set(psutil.Process().children()) - known
    process.kill()
    await eventually(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert is_good(await checker.compile(FORMS["choice"], FACTS, form_path))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", FORMS)
async def test_python_client_s_form_reaches_the_engine(name: str) -> None:
    request = build_generation("x", SamplingParams(structured_outputs=FORMS[name]), RequestOptions())
    async with FakeEngine(alphabet, model=FACTS) as engine, open_grpc(engine) as api:
        async for _ in api.generation.StreamGenerate(
            ask(structured_outputs=request.structured_outputs, text="x")
        ):
            pass
        (choice,) = engine.submitted
        expected = (await GrammarChecker(byte_tokenizer()).compile(FORMS[name], FACTS, form_path)).form
        assert choice.request.sampling.structured_outputs == expected


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"json_schema": {"schema": "{"}}, "structured_outputs.json_schema.schema"),
        ({"json_schema": {}}, "structured_outputs.json_schema.schema"),
        ({"choice": {}}, "structured_outputs.choice.values"),
        ({"choice": {"values": ["a", ""]}}, "structured_outputs.choice.values"),
        ({"grammar": {"text": "start: missing"}}, "structured_outputs.grammar.text"),
        ({"grammar": {"text": LARK, "syntax": "GRAMMAR_SYNTAX_GBNF"}}, "structured_outputs.grammar.text"),
        ({"grammar": {"text": GBNF, "syntax": 7}}, "structured_outputs.grammar.syntax"),
        ({"regex": "a" * (MAX_FORM_BYTES + 1)}, "structured_outputs.regex"),
        ({}, "structured_outputs"),
    ],
)
async def test_bad_form_over_grpc_is_an_invalid_argument(form: dict[str, Any], path: str) -> None:
    async with FakeEngine(alphabet, model=FACTS) as engine, open_grpc(engine) as api:
        error = await error_of(api.generation.StreamGenerate(ask(text="x", structured_outputs=form)))
        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == [path]
        assert len(error.message) < 1000
        good = ask(text="x", length={"max_tokens": 1})
        assert [response async for response in api.generation.StreamGenerate(good)]


@pytest.mark.parametrize("tag", [TAGS, TRIGGERED_TAGS])
async def test_structural_tags_leave_text_free_and_force_sections(tag: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    form, _ = await GrammarChecker(tokenizer).compile(StructuredOutputs(structural_tag=tag), FACTS, form_path)
    other, _ = await GrammarChecker(tokenizer).compile(FORMS["structural_tag"], FACTS, form_path)
    assert form == other
    backend = LLTokenizer(tokenizer.to_json(), n_vocab=FACTS.vocab_size, eos_token=list(FACTS.eos_token_ids))
    for text, fits in (
        ("no call at all", True),
        ("first <fn=two>17</fn> then <fn=two>4</fn> text", True),
        ("<fn=three>", False),
        ("a <fn=two>x", False),
    ):
        matcher = LLMatcher(backend, form.grammar, log_level=0)
        token_ids = tokenizer.encode(text)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) is fits, text


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ({"triggers": ["<"], "structures": []}, "no tags"),
        ({"triggers": [""], "structures": TAGS["structures"]}, "a trigger that is no text, or empty"),
        ({"triggers": ["<x"], "structures": TAGS["structures"]}, "tag 0 begins with '<fn=one>'"),
        ({"triggers": ["<"], "structures": [{"begin": "<a", "end": ""}]}, "tag 0 needs a JSON schema"),
        ({"triggers": ["<"], "structures": [{"begin": "<a", "schema": {}}]}, "tag 0 needs the texts"),
        ({"format": {"type": "sequence"}}, "a format that is not served"),
        ({"format": TRIGGERED_TAGS["format"] | {"at_least_one": True}}, "format.at_least_one is not served"),
    ],
    ids=str,
)
async def test_structural_tag_that_is_not_understood_is_refused(tag: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await GrammarChecker(byte_tokenizer()).compile(
            StructuredOutputs(structural_tag=tag), FACTS, form_path
        )


async def test_form_excludes_what_goes_on_behind_its_end() -> None:
    request = ask(text="x", structured_outputs={"regex": "a"}, length={"ignore_eos": True})
    async with FakeEngine(alphabet, model=FACTS) as engine, open_grpc(engine) as api:
        error = await error_of(api.generation.StreamGenerate(request))
        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == ["length.ignore_eos"]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
async def test_forms_over_http_reach_the_engine(body: dict[str, Any]) -> None:
    asked = [
        ({"response_format": json_schema(SCHEMA, strict=True)}, "json"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "json_object"),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, "whitespace"),
        ({"structured_outputs": {"regex": "[a-z]+"}, "response_format": {"type": "text"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", 'b"\n', "ä"]}}, "choice"),
        ({"structured_outputs": {"grammar": LARK}}, "lark"),
        ({"structured_outputs": {"grammar": GBNF}}, "gbnf"),
        ({"structured_outputs": {"structural_tag": TAGS}}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "structural_tag"),
    ]
    checker = GrammarChecker(byte_tokenizer())
    async with (
        FakeEngine(alphabet, model=FACTS) as engine,
        frontend_core(engine) as core,
        open_http(core.generator) as api,
    ):
        for fields, name in asked:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            response = await api.http.post(path, json=body | fields)
            assert response.status_code == 200, response.text
            form = engine.submitted[-1].request.sampling.structured_outputs
            assert form == (await checker.compile(FORMS[name], FACTS, form_path)).form, fields
        await api.http.post("/v1/completions", json=COMPLETION)
        assert engine.submitted[-1].request.sampling.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"type": "x"})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "#" * (MAX_FORM_BYTES + 1)}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammer": "a"}}, "structured_outputs.grammer"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
async def test_bad_form_over_http_is_a_bad_request(fields: dict[str, Any], param: str) -> None:
    async with (
        FakeEngine(alphabet, model=FACTS) as engine,
        frontend_core(engine) as core,
        open_http(core.generator) as api,
    ):
        response: httpx.Response = await api.post("/v1/chat/completions", json.dumps(CHAT | fields))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert len(error["message"]) < 1000
        assert (await api.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
