"""`triptych complete`, and the flags that are made of the table of sampling fields."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys

import pytest

from tests.helpers.command import NOBODY, exit_code
from tests.helpers.fake_frontend import FakeFrontend
from triptych.cli import wait_notice
from triptych.client.grpc_client import GenerationClient
from triptych.errors import EngineFailure
from triptych.types.sampling import SAMPLING_FIELDS, FieldKind
from triptych.wire.generation import SAMPLING_PATHS

TRIALS = {
    FieldKind.INTEGER: ("3", 3),
    FieldKind.NUMBER: ("0.5", 0.5),
    FieldKind.STRINGS: ("x", ["x"]),
    FieldKind.WORDS: ("x", ["x"]),
    FieldKind.TOKEN_IDS: ("4,5", [4, 5]),
    FieldKind.BIASES: ("4:-0.5,5:1", {4: -0.5, 5: 1.0}),
}


def find(message, path):
    for name in path.split("."):
        message = getattr(message, name)
    return getattr(message, "ids", message)


@pytest.mark.parametrize("name", [name for name, field in SAMPLING_FIELDS.items() if field.kind in TRIALS])
def test_every_sampling_field_is_a_flag(name, frontend):
    text, value = TRIALS[SAMPLING_FIELDS[name].kind]
    flag = f"--{name.replace('_', '-')}"
    assert exit_code("complete", "a", "--address", frontend.address, f"{flag}={text}") == 0
    sent = find(frontend.requests[0].generation, SAMPLING_PATHS[name])
    assert (
        list(sent) if isinstance(value, list) else dict(sent) if isinstance(value, dict) else sent
    ) == value


@pytest.mark.parametrize("name", [n for n, f in SAMPLING_FIELDS.items() if f.kind is FieldKind.BOOLEAN])
@pytest.mark.parametrize("prefix", ["", "no-"])
def test_every_switch_has_two_sides(name, prefix, frontend):
    flag = f"--{prefix}{name.replace('_', '-')}"
    assert exit_code("complete", "a", "--address", frontend.address, flag) == 0
    assert find(frontend.requests[0].generation, SAMPLING_PATHS[name]) is (prefix == "")


def test_an_object_is_json(frontend):
    words = ("--repetition-detection", '{"max_pattern_size": 4, "min_count": 3}')
    assert exit_code("complete", "a", "--address", frontend.address, *words) == 0
    assert frontend.requests[0].generation.length.repetition_detection.min_count == 3


def test_values_of_another_form_are_wrong_usage(capsys):
    for flag in (
        "--top-p=much",
        "--seed=1.5",
        "--logit-bias=4",
        "--stop-token-ids=a",
        "--repetition-detection={",
    ):
        assert exit_code("complete", "a", flag) == 2
        assert "is no value of the form" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (("--json-schema", '{"type": "object"}'), "json_schema"),
        (("--json-schema", "FILE"), "json_schema"),
        (("--json-object",), "json_object"),
        (("--regex", "[a-z]+"), "regex"),
        (("--choice", "yes", "--choice", "no"), "choice"),
        (("--grammar", "FILE"), "grammar"),
    ],
)
def test_an_answer_can_be_forced_into_a_form(words, form, frontend, tmp_path):
    file = tmp_path / "form"
    file.write_text('{"type": "object"}')
    words = tuple(str(file) if word == "FILE" else word for word in words)
    assert exit_code("complete", "a", "--address", frontend.address, *words) == 0
    structured = frontend.requests[0].generation.structured_outputs
    assert structured.WhichOneof("form") == form


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "PROMPT: none is given"),
        (("a", "--json-schema", "{no"), "--json-schema: is no JSON"),
        (("a", "--json-schema", "/no/such"), "--json-schema /no/such: No such file"),
        (("a", "--system", "s"), "--system: is for a conversation; add --chat"),
        (("a", "b", "--stats"), "--stats: times a single answer"),
        (("--prompt-file", "/no/such"), "--prompt-file /no/such: No such file"),
        (("a", "--api-key-file", "/no/such"), "--api-key-file /no/such: No such file"),
    ],
)
def test_options_that_do_not_fit_are_one_line(words, told, capsys):
    assert exit_code("complete", *words, "--address", NOBODY) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert told in shown


def test_several_prompts_and_choices_have_headings(frontend, capsys, tmp_path, monkeypatch):
    (tmp_path / "c.txt").write_text("c c")
    monkeypatch.setattr(sys, "stdin", io.StringIO("b"))
    words = ("a", "-", "--prompt-file", str(tmp_path / "c.txt"), "--n", "2", "--temperature", "1")
    assert exit_code("complete", *words, "--address", frontend.address) == 0
    assert capsys.readouterr().out == "".join(
        f"==> prompt {number}, choice {index} <==\n {text}\n"
        for number, text in enumerate(("a", "b", "c c"))
        for index in range(2)
    )


def test_logprobs_are_a_table_and_json_is_the_whole_output(frontend, capsys):
    assert exit_code("complete", "a b", "--address", frontend.address, "--logprobs", "1") == 0
    answer, head, *rows = capsys.readouterr().out.splitlines()
    assert (answer, head.split()[0]) == (" a b", "logprob")
    assert [row.split()[0] for row in rows] == ["-0.5000", "-0.5000"]
    assert exit_code("complete", "a b", "c", "--json", "--address", frontend.address, "--logprobs", "1") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["outputs"][0]["text"], second["prompt"]) == ("a b", " a b", "c")
    assert first["usage"]["num_output_tokens"] == len(first["outputs"][0]["logprobs"]) == 2


def test_one_prompt_that_fails_costs_the_others_nothing(frontend, capsys):
    frontend.on_request = lambda request: frontend.errors.extend(
        [EngineFailure("broken")] * (request.generation.text.text == "b")
    )
    assert exit_code("complete", "a", "b", "c", "--address", frontend.address) == 1
    shown = capsys.readouterr()
    assert shown.out == "==> prompt 0 <==\n a\n==> prompt 2 <==\n c\n"
    assert shown.err == "triptych complete: prompt 1: broken\n"
    frontend.errors = [EngineFailure("broken")] * 2
    assert exit_code("complete", "a", "c", "--address", frontend.address) == 1
    assert capsys.readouterr().err == "triptych complete: broken\n"


def test_address_and_key_come_from_environment_and_file(frontend, monkeypatch, tmp_path):
    keys = []
    monkeypatch.setenv("TRIPTYCH_ADDRESS", frontend.address)
    monkeypatch.setenv("TRIPTYCH_API_KEY", "from-environment")
    generate = frontend.StreamGenerate

    async def spy(request, context):
        keys.append(dict(context.invocation_metadata())["authorization"])
        async for message in generate(request, context):
            yield message

    monkeypatch.setattr(FakeFrontend, "StreamGenerate", lambda self, request, context: spy(request, context))
    with FakeFrontend() as other:
        monkeypatch.setenv("TRIPTYCH_ADDRESS", other.address)
        (tmp_path / "key").write_text("from-file\n")
        assert exit_code("complete", "a") == 0
        assert exit_code("complete", "a", "--api-key-file", str(tmp_path / "key")) == 0
        assert exit_code("complete", "a", "--api-key", "given") == 0
        (tmp_path / "key").write_text("two words\n")
        assert exit_code("complete", "a", "--api-key-file", str(tmp_path / "key")) == 2
        assert exit_code("complete", "a", "--api-key", "x", "--api-key-file", "y") == 2
    assert keys == ["Bearer from-environment", "Bearer from-file", "Bearer given"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("words", [("hang",), ("hang", "hang", "--json")])
def test_a_server_whose_engines_sleep_says_so_once(words, frontend):
    frontend.why_waiting = "requests for fake wait: engine-0 is asleep (`triptych admin wake`)"
    command = [sys.executable, "-m", "triptych.cli", "complete", *words, "--address", frontend.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == f"[{frontend.why_waiting}]\n"
        child.send_signal(signal.SIGINT)
        assert "asleep" not in child.communicate(timeout=120)[1]


async def test_an_answer_that_begins_late_for_no_known_reason_says_nothing(frontend, capsys, monkeypatch):
    monkeypatch.setattr(wait_notice, "AFTER_S", 0.0)
    frontend.token_delay_s = 0.2
    async with GenerationClient(frontend.address) as client:
        notice = wait_notice.WaitNotice(client)
        events = [event async for event in notice.watch(client.generate("a b"))]
        assert len(events) > 2
        assert capsys.readouterr().err == ""
        frontend.why_waiting = "it sleeps"
        frontend.waits_for_running = 4  # so nothing comes before the reason is told
        answers = [asyncio.create_task(read_all(notice.watch(client.generate("c d")))) for _ in range(3)]
        told = ""
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.01)
                told = capsys.readouterr().err
        frontend.waits_for_running = 0
        await asyncio.gather(*answers)
    assert told + capsys.readouterr().err == "[it sleeps]\n"


async def read_all(events):
    return [event async for event in events]
