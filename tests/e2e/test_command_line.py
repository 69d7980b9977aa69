"""The commands against three processes around a simulated model."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_simulated_stack import started_cluster
from tests.helpers.command import exit_code
from triptych.launcher.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.model  # of which the config and the tokenizer are read


@pytest.fixture(scope="module")
def simulated() -> Iterator[LocalCluster]:
    with started_cluster({"simulation.base_ms": "1", "model.max_model_len": "1024"}) as stack:
        yield stack


@pytest.fixture
def triptych(
    simulated: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command that finds the stack in the environment; returns what it printed."""
    monkeypatch.setenv("TRIPTYCH_ADDRESS", simulated.address)
    monkeypatch.setenv("TRIPTYCH_ADMIN_ADDRESS", simulated.admin_address)

    def run(*words: str) -> str:
        code = exit_code(*words)
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    return run


COMMANDS = [
    command
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs/command-line.md").read_text(), re.S)
    for command in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_documented_command(
    command: str,
    triptych: Callable[..., str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}},
        "required": ["city"],
    }
    Path("city.json").write_text(json.dumps(schema))
    Path("requests.jsonl").write_text(
        json.dumps(
            {"custom_id": "1", "url": "/v1/completions", "body": {"model": "embedded", "prompt": "One"}}
        )
    )
    stack: LocalCluster = request.getfixturevalue("simulated")
    monkeypatch.setenv("TRIPTYCH_ADDRESS", stack.address)
    program, *words = shlex.split(command.replace("127.0.0.1:8000", stack.http_address))
    assert program == "triptych"
    out = triptych(*words)
    assert out or words[0] == "run-batch"


def test_complete_and_chat(triptych: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "complete",
        "One",
        "Two",
        "--n",
        "2",
        "--logprobs",
        "1",
        "--seed",
        "3",
        "--max-tokens",
        "5",
        "--json",
    )
    outputs = [json.loads(line) for line in triptych(*words).splitlines()]
    assert [len(output["outputs"]) for output in outputs] == [2, 2]
    choice = outputs[0]["outputs"][0]
    assert (len(choice["token_ids"]), len(choice["logprobs"]), choice["finish_reason"]) == (5, 5, "length")
    assert [json.loads(line)["outputs"] for line in triptych(*words).splitlines()] == [
        output["outputs"] for output in outputs
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/set seed 5\n/retry\n/undo\nAgain\n"))
    out = triptych("chat", "--max-tokens", "4", "--temperature", "0.7")
    assert "[forgotten: Hello]" in out


def test_bench_serve_over_both_protocols(triptych: Callable[..., str], simulated: LocalCluster) -> None:
    lengths = ("--num-prompts", "12", "--input-len", "20", "--output-len", "6", "--json")
    http = ("--backend", "openai", "--base-url", f"http://{simulated.http_address}")
    for words in (("--request-rate", "100"), ("--max-concurrency", "4"), (*http, "--max-concurrency", "4")):
        report = json.loads(triptych("bench", "serve", *words, *lengths))
        assert (report["num_completed"], report["num_failed"]) == (12, 0)
        assert (report["num_input_tokens"], report["num_output_tokens"]) == (240, 72)
        assert report["max_in_flight"] <= (12 if "--request-rate" in words else 4)
        # Each of six steps takes a millisecond. A client that was late for the first token may see the others at once.
        assert report["e2el_ms"]["mean"] > 3
        assert report["tpot_ms"]["mean"] > 0


def test_run_batch(triptych: Callable[..., str], simulated: LocalCluster, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {
        "/v1/completions": {"prompt": "One"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "One"}]},
    }
    lines = [
        {"custom_id": f"{url} {number}", "url": url, "body": {"model": "embedded", "max_tokens": 3, **body}}
        for url, body in bodies.items()
        for number in range(10)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    url = f"http://{simulated.http_address}"
    triptych("run-batch", "-i", str(source), "-o", str(target), "--base-url", url, "--max-concurrency", "7")
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {entry["custom_id"] for entry in found} == {line["custom_id"] for line in lines}
    assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in found} == {3}


def test_admin_watch(triptych: Callable[..., str]) -> None:
    head, *rows = triptych("admin", "watch", "--count", "2", "--interval-s", "0.1").splitlines()
    assert "waiting" in head
    assert [row.split()[1] for row in rows] == ["ready", "ready"]
