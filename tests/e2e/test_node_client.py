"""The public protos serve a client in another language: examples/node, run by node as a reader would run it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cut_proxy import CutProxy
from tests.helpers.node import CAPTURED, NODE, install_example
from triptych.client.llm import LLM
from triptych.launcher.local_cluster import LocalCluster
from triptych.types.sampling import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.thorough]

RUN_S = 180.0


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("node_client"))


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NODE, script, *arguments], timeout=RUN_S, check=False, **CAPTURED)


def generate(example: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(example / "generate.mjs", *arguments)


def test_a_node_client_prints_the_answer_and_its_usage(cluster: LocalCluster, example: Path) -> None:
    done = generate(example, cluster.address, "What is the capital of France?")
    assert (done.returncode, done.stderr) == (0, "")
    text, usage = done.stdout.splitlines()
    assert text == "The capital of France is Paris."
    assert re.fullmatch(r"usage: [1-9]\d* prompt tokens \(\d+ cached\), [1-9]\d* output tokens", usage)


def test_a_node_client_learns_which_field_is_wrong(cluster: LocalCluster, example: Path) -> None:
    done = generate(example, cluster.address, "Hi", "3")
    assert (done.returncode, done.stdout) == (1, "")
    status, reason, violation = done.stderr.splitlines()
    assert status.startswith("INVALID_ARGUMENT: ")
    assert reason == "  reason: INVALID_REQUEST (triptych.dev)"
    assert violation == "  sampling.temperature: 3 is above the limit 2"


def test_a_node_client_without_a_server_says_so(example: Path) -> None:
    done = generate(example, "127.0.0.1:1", "Hi")  # nobody listens on tcpmux
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("UNAVAILABLE: ")


def test_a_node_client_that_is_interrupted_cancels_its_request(cluster: LocalCluster, example: Path) -> None:
    arguments = [
        NODE,
        example / "generate.mjs",
        cluster.address,
        "Count from one to a thousand, in words.",
        "1",
    ]
    captured = {key: value for key, value in CAPTURED.items() if key != "capture_output"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **captured) as process:
        try:
            assert process.stdout is not None
            process.stdout.read(1)  # it streams
            process.send_signal(signal.SIGINT)
            printed, errors = process.communicate(timeout=RUN_S)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert printed.endswith("\ncancelled\n")


@pytest.mark.thorough
async def test_a_node_client_goes_on_after_a_broken_connection(cluster: LocalCluster, example: Path) -> None:
    prompt, num_tokens = "Tell me a story.", 48
    async with CutProxy(cluster.address) as proxy:
        proxy.cut_after(down=1000)  # some tokens into the answer
        done = await asyncio.to_thread(run, example / "resume.mjs", proxy.address, prompt, str(num_tokens))
        assert proxy.num_cuts == 1
    assert done.returncode == 0, done.stderr
    broken = re.fullmatch(r"[A-Z_]+ after (\d+) tokens; trying again\n", done.stderr)
    assert broken is not None, done.stderr
    assert 0 < int(broken[1]) < num_tokens
    text, _, last = done.stdout.rstrip().rpartition("\n")
    counted = re.fullmatch(r"(\d+) tokens, seed (\d+)", last)
    assert counted is not None
    params = SamplingParams(temperature=0.8, max_tokens=num_tokens, seed=int(counted[2]))
    with LLM(address=cluster.address) as llm:
        (answer,) = llm.chat([{"role": "user", "content": prompt}], params)
    assert (text, int(counted[1])) == (answer.outputs[0].text.rstrip(), len(answer.outputs[0].token_ids))


@pytest.mark.thorough
def test_the_openai_package_streams_calls_tools_and_forms_outputs(
    cluster: LocalCluster, example: Path
) -> None:
    done = run(example / "openai.mjs", f"http://{cluster.http_address}/v1")
    assert (done.returncode, done.stderr) == (0, "")
    answer, total, calls, formed, refused = done.stdout.splitlines()
    assert answer == "The capital of France is Paris."
    assert re.fullmatch(r"total tokens: [1-9]\d*", total)
    assert re.fullmatch(r'calls: weather \{"city":".*"\}', calls)
    assert formed in ('formed: {"verdict":"yes"}', 'formed: {"verdict":"no"}')
    assert refused == "refused: 400 temperature"
