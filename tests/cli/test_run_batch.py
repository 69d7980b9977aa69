"""`triptych run-batch` against the frontend's HTTP server; files in OpenAI's batch form."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.helpers.command import NOBODY, exit_code, wait_until
from tests.helpers.fake_generator import MODEL
from triptych.client.batch_file import BatchOutput, BatchRequest
from triptych.errors import ConfigError, EngineFailure, GenerationLost, QueueFull

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(custom_id, url=COMPLETIONS, **body):
    prompt = {"messages": [{"role": "user", "content": "a"}]} if url == CHAT else {"prompt": "a"}
    body = {"model": MODEL, "max_tokens": 4, **prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def batch(api, tmp_path):
    """Runs the command over these lines; returns exit code and the lines of the output by id."""

    def run(*lines, options=()):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(
            "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in lines)
        )
        words = ("-i", str(source), "-o", str(target), "--base-url", f"http://127.0.0.1:{api.port}", *options)
        code = exit_code("run-batch", *words)
        found = [json.loads(entry) for entry in target.read_text().splitlines()] if target.exists() else []
        assert len({entry["custom_id"] for entry in found}) == len(found)
        return code, {entry["custom_id"]: entry for entry in found}

    return run


def test_each_request_is_answered_as_openai_would(batch, api):
    code, found = batch(line("1"), "", line("2", CHAT), line("ü", prompt=["a", "b"]))
    assert code == 0
    assert set(found) == {"1", "2", "ü"}
    for entry in found.values():
        assert entry["id"].startswith("batch_req_")
        assert entry["error"] is None
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"]
    assert Completion.model_validate(found["1"]["response"]["body"]).choices[0].text == "0 Once upon a"
    assert ChatCompletion.model_validate(found["2"]["response"]["body"]).choices[0].message.content
    assert len(found["ü"]["response"]["body"]["choices"]) == 2


def test_a_bad_request_fails_alone_and_is_not_sent_again(batch, api, capsys):
    lines = (line("1"), line("2", temperature=9), line("3", "/v1/no/such"))
    code, found = batch(*lines)
    assert code == 1
    assert "1 requests answered, 2 failed" in capsys.readouterr().err
    assert {name: entry["response"]["status_code"] for name, entry in found.items()} == {
        "1": 200,
        "2": 400,
        "3": 404,
    }
    assert "temperature" in found["2"]["response"]["body"]["error"]["message"]
    num_sent = len(api.generator.requests)
    assert batch(*lines)[0] == 0
    assert len(api.generator.requests) == num_sent


def test_a_full_server_is_asked_again(batch, api):
    api.generator.admission_errors = [QueueFull("full", 0.01)] * 3
    code, found = batch(*(line(str(number)) for number in range(4)))
    assert code == 0
    assert [entry["response"]["status_code"] for entry in found.values()] == [200] * 4


def test_a_refusal_is_written_when_time_is_up_and_bettered_the_next_time(batch, api):
    api.generator.admission_errors = [QueueFull("full", 60.0)]
    options = ("--retry-s", "1", "--max-concurrency", "1")
    code, found = batch(line("1"), line("2"), options=options)
    assert code == 1
    assert {entry["response"]["status_code"] for entry in found.values()} == {200, 429}
    num_sent = len(api.generator.requests)
    code, found = batch(line("1"), line("2"), options=options)
    assert code == 0
    assert [entry["response"]["status_code"] for entry in found.values()] == [200] * 2
    assert len(api.generator.requests) == num_sent + 1


def test_an_engine_failure_is_an_answer(batch, api):
    api.generator.admission_errors = [EngineFailure("broken")]
    code, found = batch(line("1"))
    assert (code, found["1"]["response"]["status_code"]) == (1, 500)


def test_half_a_line_is_written_again(batch, tmp_path):
    assert batch(line("1"), line("2"), options=("--max-concurrency", "1"))[0] == 0
    target = tmp_path / "out.jsonl"
    target.write_bytes(target.read_bytes()[:-20])
    code, found = batch(line("1"), line("2"), line("3"))
    assert (code, set(found)) == (0, {"1", "2", "3"})
    assert list(tmp_path.glob(".*")) == []


def test_an_interrupted_batch_goes_on(api, batch, tmp_path):
    api.generator.hold_after_words = 1
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line(str(n), max_tokens=1 if n < 3 else 5)) for n in range(5)))
    url = f"http://127.0.0.1:{api.port}"
    words = [sys.executable, "-m", "triptych.cli", "run-batch", "-i", source, "-o", target, "--base-url", url]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        wait_until(lambda: target.exists() and target.read_text().count("\n") == 3)
        os.kill(child.pid, signal.SIGINT)
        assert "the same command goes on" in child.communicate(timeout=120)[1]
        assert child.returncode == 130
    api.generator.hold_after_words = None
    num_sent = len(api.generator.requests)
    code, found = batch(*(json.loads(text) for text in source.read_text().splitlines()))
    assert (code, len(found)) == (0, 5)
    assert len(api.generator.requests) == num_sent + 2


def test_a_second_batch_on_one_output_is_refused(api, batch, tmp_path, capsys):
    api.generator.hold_after_words = 1
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line(str(n), max_tokens=1 if n < 3 else 5)) for n in range(5)))
    target.write_text("half a li")  # the first one puts a new file into its place
    url = f"http://127.0.0.1:{api.port}"
    words = ["run-batch", "-i", str(source), "-o", str(target), "--base-url", url]
    with subprocess.Popen([sys.executable, "-m", "triptych.cli", *words], stderr=subprocess.PIPE) as child:
        wait_until(lambda: target.read_text().count("\n") == 3)
        before = target.read_bytes()
        assert exit_code(*words) == 2
        assert f"{target}: another run-batch is writing to it" in capsys.readouterr().err
        assert target.read_bytes() == before
        os.kill(child.pid, signal.SIGINT)
        child.communicate(timeout=120)
    api.generator.hold_after_words = None
    assert exit_code(*words) == 0  # the lock ends with its process
    assert target.read_text().count("\n") == 5


def test_bad_lines_are_all_named_and_nothing_is_sent(batch, api, capsys):
    bad = [
        "{",
        "[]",
        json.dumps({**line("1"), "method": "GET", "url": "/health"}),
        json.dumps({**line(""), "body": 3}),
        json.dumps(line("2", stream=True)),
        json.dumps({**line("3"), "url": "/v1/x y"}),
    ]
    assert batch(line("ok"), *bad, line("ok"))[0] == 2
    told = capsys.readouterr().err
    for part in (
        "line 2: is no JSON",
        "line 3: expected an object",
        "line 4: method: expected POST, not 'GET'; url: expected a path",
        "line 5: custom_id: expected text, not ''; body: expected an object, not 3",
        "line 6: body.stream",
        "line 7: url",
        "line 8: custom_id 'ok' is that of line 1",
    ):
        assert part in told
    assert api.generator.requests == []
    assert batch("")[0] == 2
    assert "holds no request" in capsys.readouterr().err


def test_an_output_that_is_something_else_is_kept(batch, tmp_path, capsys):
    precious = tmp_path / "out.jsonl"
    precious.write_text("my thesis\n")
    words = ("run-batch", "-i", str(tmp_path / "in"), "-o", str(precious), "--base-url", f"http://{NOBODY}")
    (tmp_path / "in").write_text(json.dumps(line("1")))
    assert exit_code(*words) == 2
    assert "line 1 is no answer of a batch" in capsys.readouterr().err
    assert precious.read_text() == "my thesis\n"
    assert exit_code("run-batch", "-i", str(precious), "-o", str(precious)) == 2
    assert exit_code("run-batch", "-i", "/no/such", "-o", "x") == 2
    assert exit_code("run-batch", "-i", str(tmp_path / "in"), "-o", "/no/such/x") == 2
    assert "No such file" in capsys.readouterr().err


def test_nobody_there_is_said_at_once(tmp_path, capsys):
    (tmp_path / "in").write_text(json.dumps(line("1")))
    words = ("run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    assert exit_code(*words, "--base-url", f"http://{NOBODY}") == 1
    assert "no server answers at" in capsys.readouterr().err
    assert exit_code(*words, "--base-url", f"http://{NOBODY}", "--max-concurrency", "0") == 2


def test_a_connection_that_breaks_is_an_error_in_the_output(tmp_path):
    output = BatchOutput(tmp_path / "out")
    assert not output.add(BatchRequest("1", COMPLETIONS, b"{}"), GenerationLost("gone"))
    output.close()
    entry = json.loads((tmp_path / "out").read_text())
    assert (entry["response"], entry["error"]["message"]) == (None, "gone")
    output = BatchOutput(tmp_path / "out")
    assert output.answered == set()
    output.close()


def test_a_full_disk_and_what_is_no_file_are_said(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="/dev/full: is no file"):
        BatchOutput(Path("/dev/full"))
    output = BatchOutput(tmp_path / "out")
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(output, "_stream", full)
        with pytest.raises(ConfigError, match="out: No space left on device"):
            output.add(BatchRequest("1", COMPLETIONS, b"{}"), GenerationLost("gone"))
