"""Forms of outputs with the real model, held against jsonschema and re."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import openai
import pytest

from triptych import LLM, SamplingParams, StructuredOutputs
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.outputs import CompletionOutput

pytestmark = pytest.mark.model

SMALL = {"type": "integer", "minimum": -99, "maximum": 99}
WORD = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "is_member": {"type": "boolean"},
        "pets": {"type": "array", "maxItems": 3, "items": {"enum": ["cat", "dog", 'a "bird"']}},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": WORD},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "null"}, {"const": -1.5}, WORD]},
                "left": {"$ref": "#/$defs/leaf"},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        },
        "leaf": {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 3},
    },
}
SCHEMAS = {"person": PERSON, "tree": TREE, "values": {"enum": ["größer", "a\nb", [1, {"x": True}]]}}


def sampling(form: StructuredOutputs, seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "seed": seed, "structured_outputs": form, **fields})


def generate(cluster: LocalCluster, *requests: SamplingParams) -> list[CompletionOutput]:
    with LLM(address=cluster.address) as llm:
        answers = llm.generate(["Write something: "] * len(requests), list(requests), use_tqdm=False)
    return [output for answer in answers for output in answer.outputs]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SCHEMAS)
def test_sampled_json_conforms_to_its_schema(cluster: LocalCluster, name: str) -> None:
    form = StructuredOutputs(json=SCHEMAS[name])
    outputs = generate(cluster, *[sampling(form, seed) for seed in range(10)])
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMAS[name])


@pytest.mark.thorough
def test_other_forms_match(cluster: LocalCluster) -> None:
    choices, pattern = ["yes", "yes, of course", "no"], "[A-Z][a-z]{2,9} (and|or) [0-9]{1,3}!"
    lark = StructuredOutputs(grammar='start: "(" inner ")"\ninner: start | /[a-c]{2}/')
    gbnf = StructuredOutputs(grammar='root ::= "<" [0-9] [0-9]? ">"')
    forms = [
        StructuredOutputs(choice=choices),
        StructuredOutputs(regex=pattern),
        lark,
        gbnf,
        StructuredOutputs(json_object=True, whitespace_pattern=" ?"),
    ]
    choice, matched, nested, digits, anything = generate(
        cluster, *[sampling(form, max_tokens=60) for form in forms]
    )
    assert choice.text in choices
    assert re.fullmatch(pattern, matched.text)
    if nested.finish_reason == "stop":
        assert re.fullmatch(r"\(+[a-c]{2}\)+", nested.text)
        assert nested.text.count("(") == nested.text.count(")")
    assert re.fullmatch("<[0-9]{1,2}>", digits.text)
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.text), dict)


@pytest.mark.thorough
def test_forms_leave_other_requests_of_a_batch_alone(cluster: LocalCluster) -> None:
    requests = [
        SamplingParams(max_tokens=30, seed=5),
        sampling(StructuredOutputs(json=PERSON), 6),
        sampling(StructuredOutputs(regex="[a-z ]{40}"), 7),
    ]
    together = generate(cluster, *requests)
    assert [generate(cluster, request)[0].token_ids for request in requests] == [
        o.token_ids for o in together
    ]


@pytest.mark.thorough
def test_each_choice_conforms(cluster: LocalCluster) -> None:
    outputs = generate(cluster, sampling(StructuredOutputs(json=PERSON), 3, n=3))
    assert len({output.text for output in outputs}) == 3
    for output in outputs:
        jsonschema.validate(json.loads(output.text), PERSON)


@pytest.mark.thorough
def test_stop_string_ends_the_form_early(cluster: LocalCluster) -> None:
    form = StructuredOutputs(json=PERSON)
    (whole,) = generate(cluster, sampling(form, 4))
    (cut,) = generate(cluster, sampling(form, 4, stop=['"age"']))
    assert cut.stop_reason == '"age"'
    assert cut.text == whole.text.partition('"age"')[0]


@pytest.mark.thorough
def test_stream_says_what_the_whole_answer_says(cluster: LocalCluster) -> None:
    client = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)
    call: dict[str, Any] = {
        "model": "embedded",
        "messages": [{"role": "user", "content": "Describe a person."}],
        "seed": 11,
        "max_tokens": 200,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    }
    whole = client.chat.completions.create(**call).choices[0].message.content
    stream = client.chat.completions.create(**call, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    jsonschema.validate(json.loads(whole or ""), PERSON)


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of which every output is short."""
    kinds = ["string", "pattern", "integer", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match draw.choice(kinds):
        case "object":
            names = draw.sample(["a", "b c", "größe", 'q"', "e\n", "f"], draw.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            schema = {"type": "array", "items": random_schema(draw, depth - 1)}
            return {**schema, "minItems": least, "maxItems": least + draw.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case "string":
            least = draw.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 5)}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-z]{1,4}$", "^(x|yy)-[0-9]{2}$", "^$"])}
        case "integer":
            low = draw.randint(-2000, 2000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 1, 9, 12345])}
        case "enum":
            return {"enum": draw.sample(["a", 1, -2.5, None, True, [], {"k": "v"}], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice(["ä", "", 0, [1, 2]])}
        case kind:
            return {"type": kind}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_outputs_conform_to_random_schemas(cluster: LocalCluster) -> None:
    draw = random.Random(17)
    schemas = [random_schema(draw) for _ in range(300)]
    requests = [sampling(StructuredOutputs(json=schema), seed) for seed, schema in enumerate(schemas)]
    num_whole = 0
    for schema, output in zip(schemas, generate(cluster, *requests), strict=True):
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
            num_whole += 1
    assert num_whole > 280
