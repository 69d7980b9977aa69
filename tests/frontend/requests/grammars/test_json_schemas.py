"""Schemas of libraries are taken, and what the grammar lets through conforms, as a validator of others says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from itertools import product
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter

from tests.frontend.requests.grammars.library_schemas import IMPOSSIBLE, LOST, SCHEMAS, record
from tests.helpers.byte_tokenizer import EOS, byte_tokenizer
from tests.helpers.fake_engine import MODEL
from triptych.errors import InvalidRequest
from triptych.types.structured import StructuredOutputs
from triptych_services.frontend.requests.grammars.compiler import CompiledForm, GrammarChecker
from triptych_services.frontend.requests.grammars.json_schemas import normalize

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_id(EOS) or 0
FACTS = replace(MODEL, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS_ID,))
BACKEND = LLTokenizer(TOKENIZER.to_json(), n_vocab=FACTS.vocab_size, eos_token=[EOS_ID])


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker(TOKENIZER)


async def compile_schema(checker: GrammarChecker, schema: Any, *, strict: bool = True) -> CompiledForm:
    form = StructuredOutputs(json=json.dumps(schema), strict=strict)
    return await checker.compile(form, FACTS, lambda _: "schema")


async def matcher_of(checker: GrammarChecker, schema: Any) -> LLMatcher:
    form, _ = await compile_schema(checker, schema)
    assert form.grammar is not None
    return LLMatcher(BACKEND, form.grammar, log_level=0)


def allows(matcher: LLMatcher, text: str) -> bool:
    token_ids, matcher = TOKENIZER.encode(text, add_special_tokens=False), matcher.deep_copy()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", SCHEMAS)
async def test_schemas_of_libraries(checker: GrammarChecker, name: str) -> None:
    schema = SCHEMAS[name]
    if name in IMPOSSIBLE:
        for strict in (True, False):
            with pytest.raises(InvalidRequest, match="cannot be enforced: Unsatisfiable"):
                await compile_schema(checker, schema, strict=strict)
        return
    if name in LOST:
        with pytest.raises(InvalidRequest, match=r"^schema: cannot be enforced: "):
            await compile_schema(checker, schema)
    else:
        assert not (await compile_schema(checker, schema)).not_enforced
    lenient = await compile_schema(checker, schema, strict=False)
    assert lenient.not_enforced == tuple(f"schema.{place}" for place in LOST.get(name, ()))


def test_most_schemas_of_libraries_are_taken() -> None:
    assert len(SCHEMAS) - len(IMPOSSIBLE) == 70
    assert len(SCHEMAS) - len(IMPOSSIBLE) - len(LOST) == 59


REWRITTEN = [
    ({"type": "string", "format": "password"}, {"type": "string"}),
    (record(a={"format": "uuid4"})["properties"]["a"], {}),
    ({"propertyNames": {"type": "string"}}, {}),
    ({"propertyNames": True}, {}),
    (
        {"propertyNames": {"enum": ["a.b", "c"]}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a.b": {"type": "integer"}, "c": {"type": "integer"}}, "additionalProperties": False,
         "type": "object"},
    ),
    (
        {"properties": {"c": {"const": 1}}, "propertyNames": {"enum": ["b", "c"]}, "additionalProperties": {}},
        {"properties": {"b": {}, "c": {"const": 1}}, "additionalProperties": False, "type": "object"},
    ),
    (
        {"properties": {"c": {}}, "propertyNames": {"enum": ["b", "c"]}, "additionalProperties": False},
        {"properties": {"c": {}}, "additionalProperties": False, "type": "object"},
    ),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False, "type": "object"},
    ),
    (
        {"properties": {"ab": {}}, "propertyNames": {"minLength": 2}},
        {"properties": {"ab": {}}, "patternProperties": {"^.{2,}$": True}, "additionalProperties": False,
         "type": "object"},
    ),
    ({"properties": {"a": {}}, "unevaluatedProperties": False},
     {"properties": {"a": {}}, "additionalProperties": False}),
    ({"additionalProperties": {}, "unevaluatedProperties": False}, {"additionalProperties": {}}),
    ({"anyOf": [{"type": "string"}, {"not": {}}, False]}, {"anyOf": [{"type": "string"}]}),
    ({"minimum": 0, "exclusiveMinimum": True}, {"exclusiveMinimum": 0}),
    ({"minimum": 0, "exclusiveMinimum": False}, {"minimum": 0}),
    ({"items": [{}], "additionalItems": False}, {"prefixItems": [{}], "items": False}),
    ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
    ({"$defs": {"x": {"$anchor": "here"}}, "$ref": "#here"}, {"$defs": {"x": {}}, "$ref": "#/$defs/x"}),
    ({"$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}, {"items": {"$ref": "#"}}),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
     {"type": "number", "minimum": 1.000001, "maximum": 1.5}),
    # nothing of this may change
    *(
        (schema, schema)
        for schema in (
            {"properties": {"format": {"type": "string"}, "propertyNames": {"type": "string"}}},
            {"enum": [{"format": "x", "propertyNames": {"type": "string"}}], "default": {"not": {}}},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
            {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
            {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b$": {}}},
            {"properties": {"b": {}}, "propertyNames": {"pattern": "^a"}},
            {"properties": {"b": {}}, "propertyNames": {"enum": ["a"]}},
            {"type": "string", "format": "uri"},
            True,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), REWRITTEN, ids=str)
def test_schemas_are_rewritten_to_what_means_the_same(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert normalize(schema, is_strict=True, can_match=lambda _: True) == (expected, ())
    assert json.dumps(schema) == before


async def test_a_map_with_listed_names_has_each_once(checker: GrammarChecker) -> None:
    """Schemas of `z.record(z.enum(…), …)` of zod require all of the names."""
    kinds = {
        "propertyNames": {"type": "string", "enum": ["cat", "dog"]},
        "additionalProperties": {"type": "boolean"},
    }
    for required, fewer in ((["cat", "dog"], False), ([], True)):
        matcher = await matcher_of(checker, record(kinds={"type": "object", **kinds, "required": required}))
        assert allows(matcher, '{"kinds":{"cat":true,"dog":false}}')
        assert allows(matcher, '{"kinds":{"cat":true}}') == fewer
        for wrong in (
            '"cat":true,"dog":true,"cat":true',
            '"cat":true,"dog":1',
            '"cat":true,"dog":true,"cow":true',
        ):
            assert not allows(matcher, f'{{"kinds":{{{wrong}}}}}')


VALUES = ["-1", "-1.0", "-1.5", "-1.50", "-1.2", "-1.000001", "0", "-0", "0.0", "1", "1.0", "1.5", "1e0", "-1e0", "10",
          "99.9", "0.1", "0.10", "0.099", "-0.5", "2", "2.0", "1.000001", "-0.000001", "100"]  # fmt: skip
RANGES = [
    (-1.5, -1.0),
    (-1.5, -1),
    (-1, 0),
    (0, 1),
    (0.1, 1),
    (-0.5, 0),
    (1, 1.5),
    (0, 100),
    (-1.0, 1.0),
    (1, 2),
    (0.5, 0.75),
]


@pytest.mark.parametrize(("low", "high"), RANGES)
async def test_bounds_of_numbers_hold(checker: GrammarChecker, low: float, high: float) -> None:
    for lower, upper in product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        schema = {"type": "number", lower: low, upper: high}
        matcher, validator = await matcher_of(checker, schema), Draft202012Validator(schema)
        wrong = [
            text for text in VALUES if allows(matcher, text) and not validator.is_valid(json.loads(text))
        ]
        assert not wrong, schema
        middle = f"{(low + high) / 2:g}"
        assert allows(matcher, middle), "and the range is not empty"


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date-time", ["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.25+01:00"],
         ["2023-02-29T00:00:00Z", "2023-01-01T00:00:60Z", "0000-01-01T00:00:00Z", "2023-04-31T00:00:00Z"]),
        ("date", ["2000-02-29", "0400-02-29", "1900-02-28", "0001-01-01"], ["1900-02-29", "2023-13-01", "0000-02-02"]),
        ("time", ["23:59:59Z", "00:00:00.5-08:00"], ["24:00:00Z", "00:00:60Z"]),
    ],
)  # fmt: skip
async def test_dates_and_times_are_those_that_readers_take(
    checker: GrammarChecker, format: str, good: list[str], bad: list[str]
) -> None:
    matcher = await matcher_of(checker, {"type": "string", "format": format})
    both = await matcher_of(checker, {"type": "string", "format": format, "pattern": "^[0-9].*$"})
    assert allows(both, json.dumps(good[0]))
    assert not allows(both, json.dumps(bad[0]))
    kinds: dict[str, Any] = {"date-time": datetime, "date": date}
    for text in good:
        assert allows(matcher, json.dumps(text)), text
        if format in kinds:
            TypeAdapter(kinds[format]).validate_python(text)
    for text in bad:
        assert not allows(matcher, json.dumps(text)), text


def schemas(seed: int) -> Iterator[dict[str, Any]]:
    """Yield schemas of all kinds inside of each other."""
    choice = random.Random(seed)
    strings = [
        {"type": "string", "maxLength": 5},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}(-[0-9]+)?$", "maxLength": 9},
        {"type": "string", "format": "date-time"},
        {"enum": ["a", 'quo"te', "ä\n", 3, None, {"x": [1]}]},
        {"const": {"k": [1, "2"]}},
    ]
    numbers = [
        {"type": "integer"},
        {"type": "integer", "exclusiveMinimum": -3, "maximum": 12},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.75},
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    ]

    def draw(depth: int) -> Any:
        kind = choice.randrange(4 if depth else 2)
        if kind < 2:
            return choice.choice((strings, numbers)[kind])
        if kind == 2:
            shape: dict[str, Any] = {
                "type": "array",
                "items": draw(depth - 1),
                "maxItems": choice.randrange(1, 4),
            }
            if choice.random() < 0.5:
                shape |= {"prefixItems": [draw(depth - 1)], "minItems": 1}
            return shape
        names = choice.sample(["a", "b c", "ä", 'q"', "$ref", "items", "z"], choice.randrange(1, 4))
        properties = {name: draw(depth - 1) for name in names}
        shape = {
            "type": "object",
            "properties": properties,
            "required": names[:-1],
            "additionalProperties": False,
        }
        if choice.random() < 0.3:
            shape = {
                "type": "object",
                "propertyNames": {"enum": names},
                "additionalProperties": draw(depth - 1),
            }
        return {"anyOf": [shape, draw(depth - 1)]} if choice.random() < 0.3 else shape

    while True:
        yield draw(3)


def walk(matcher: LLMatcher, seed: int) -> str | None:
    """Return an output of tokens drawn from the masks; None if it has no end after many."""
    choice = random.Random(seed)
    closing = set(TOKENIZER.encode('"}]', add_special_tokens=False))
    output: list[int] = []
    while len(output) < 600:
        mask = matcher.compute_bitmask()
        allowed = [
            8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
        ]
        ends = [token_id for token_id in allowed if token_id in closing]
        token_id = choice.choice(ends if ends and choice.random() < 0.4 else allowed)
        if EOS_ID in allowed and choice.random() < 0.7:
            token_id = EOS_ID
        if token_id == EOS_ID:
            return TOKENIZER.decode(output, skip_special_tokens=True)
        assert matcher.consume_token(token_id)
        output.append(token_id)
    return None


async def test_what_the_masks_let_through_conforms(checker: GrammarChecker) -> None:
    num_whole = 0
    for number, schema in zip(range(60), schemas(7), strict=False):
        matcher, validator = await matcher_of(checker, schema), Draft202012Validator(schema)
        for seed in range(3):
            text = walk(matcher.deep_copy(), 1000 * number + seed)
            if text is not None:
                num_whole += 1
                assert validator.is_valid(json.loads(text)), (schema, text)
                for moment in find_moments(schema, json.loads(text)):
                    TypeAdapter(datetime).validate_python(moment)
    assert num_whole > 120, "most walks come to an end"


def find_moments(schema: Any, value: Any) -> Iterator[str]:
    """Yield the texts that the schema wants to be a date and a time."""
    if isinstance(schema, dict) and schema.get("format") == "date-time":
        yield value
    elif isinstance(value, list) and "items" in schema:
        for entry in value[len(schema.get("prefixItems", ())) :]:
            yield from find_moments(schema["items"], entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from find_moments(schema.get("properties", {}).get(name, {}), entry)
