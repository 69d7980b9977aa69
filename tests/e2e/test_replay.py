"""A stack that records, three processes and a simulated model, and `python -m tools.replay` of what it recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from triptych import LLM, SamplingParams
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.config.loader import load_config
from triptych.launcher.local_cluster import LocalCluster
from triptych.rpc.channel import open_blocking_channel

READY_S = 120.0
REQUESTS, TOKENS, MAX_NUM_SEQS = 6, 100, 4
STEP_MS = 10
"""All rows are taken for a second at least, which a busy machine does not miss."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the journal of a run in which the worker was killed and everything was computed again."""
    directory = tmp_path_factory.mktemp("journal")
    flags = {
        "simulation.enabled": "true",
        "simulation.base_ms": str(STEP_MS),
        "scheduler.max_num_seqs": str(MAX_NUM_SEQS),
        "journal.path": str(directory),
        "frontend.admin_port": "0",
        "frontend.http_port": "0",
        **{f"{leaf}.port": "0" for leaf in ("frontend", "engine", "worker")},
        **{f"{leaf}.metrics_port": "0" for leaf in ("frontend", "engine", "worker")},
    }
    lines: list[str] = []
    with LocalCluster(load_config(env={}, flags=flags), on_log_line=lines.append) as stack:
        stack.wait_ready(READY_S)
        with LLM(address=stack.address) as llm:
            sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
            prompts = [f"{number} bottles of beer" for number in range(REQUESTS)]
            undisturbed = llm.generate(prompts, sampling)
            with ThreadPoolExecutor() as executor:
                running = executor.submit(llm.generate, prompts, sampling)
                wait_until_running(stack.admin_address)
                os.kill(stack.pids["worker"], signal.SIGKILL)
                disturbed = running.result(READY_S)
    assert [o.outputs[0].token_ids for o in disturbed] == [o.outputs[0].token_ids for o in undisturbed]
    assert any("was lost" in line for line in lines), lines
    return directory


def wait_until_running(address: str) -> None:
    """Until every row is taken."""
    deadline = time.monotonic() + READY_S
    with open_blocking_channel(address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        while admin.GetStatus(admin_pb2.GetStatusRequest()).status.num_running < MAX_NUM_SEQS:
            assert time.monotonic() < deadline, "nothing runs"
            time.sleep(0.005)


def run_replay(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.replay", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.thorough
def test_the_scheduler_of_another_process_decides_the_same(journal: Path) -> None:
    """Another process has other hashes of strings, and other addresses."""
    ended = run_replay(journal)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{2 * REQUESTS} requests: no divergence (the recording ended: the engine stopped)" in ended.stdout


@pytest.mark.thorough
def test_a_worker_of_the_recorded_config_computes_the_same(journal: Path) -> None:
    ended = run_replay(journal, "--against", "worker")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no divergence" in ended.stdout


@pytest.mark.thorough
def test_a_worker_that_cannot_start_is_told_with_its_last_words(journal: Path, tmp_path: Path) -> None:
    [file] = journal.glob("*.journal")
    doctored = tmp_path / file.name
    doctored.write_bytes(file.read_bytes().replace(b"embedded", b"/no/such"))
    ended = run_replay(doctored, "--against", "worker")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "the worker exited with code 2" in ended.stderr
    assert "/no/such" in ended.stderr
    assert "Traceback" not in ended.stderr
