"""A hostile tenant beside a bystander, over HTTP: each attack is answered, at a bounded price, and harms nobody.

`benchmarks/stack/hostile.py` measures what the bystander sees. Here only what no busy machine changes is checked: the
answers of both, and the CPU time that the frontend spends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.stack.attacks import ATTACKS, flood_headers, send
from triptych.config.api_keys import entry_line
from triptych.launcher.launch import config_from_overrides, launch

HOSTILE, BYSTANDER = "hostile-key", "bystander-key"
NUM_REQUESTS = 2
LONGEST = {
    "schema of 9,000 properties",
    "grammar that compiles slowly",
    "1 MB to /tokenize",
    "prompt that is cut",
    "16,384 messages",
}
_OWN_CPU_S = 3.0  # for the bystander, and for a process that starts again
BODIES = (
    {"prompt": "Once upon a time", "seed": 1},
    {"prompt": "Once upon a time " * 300, "seed": 2},
    {"prompt": "Answer:", "structured_outputs": {"choice": ["yes", "no"]}, "seed": 3},
)


class Bystander:
    """A tenant whose requests always have the same answers."""

    def __init__(self, address: str) -> None:
        headers = {"Authorization": f"Bearer {BYSTANDER}"}
        self._http = httpx.Client(base_url=f"http://{address}", headers=headers, timeout=120)
        self.answers = self.ask()

    def ask(self) -> list[str]:
        with ThreadPoolExecutor(len(BODIES)) as pool:
            return list(pool.map(self._ask_one, BODIES))

    def _ask_one(self, body: dict[str, object]) -> str:
        fields = {"model": "embedded", "max_tokens": 12, "temperature": 1}
        answer = self._http.post("/v1/completions", json={**fields, **body})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("\n".join([entry_line("hostile", HOSTILE), entry_line("bystander", BYSTANDER), ""]))
    keys.chmod(0o600)
    config = config_from_overrides(
        {"simulation.enabled": True, "simulation.base_ms": 2, "frontend.api_keys_file": str(keys)}
    )
    cluster = launch(config, show_progress=False)
    yield cluster.http_address
    cluster.stop()


@pytest.fixture(scope="module")
def bystander(address: str) -> Bystander:
    return Bystander(address)


@pytest.fixture(scope="module")
def frontend(address: str) -> psutil.Process:
    """Return the process that listens at the address; stacks of other tests may be there as well."""
    port = int(address.rpartition(":")[2])
    (found,) = [
        child
        for child in psutil.Process().children()
        if any(
            socket.status == psutil.CONN_LISTEN and socket.laddr.port == port
            for socket in child.net_connections()
        )
    ]
    return found


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process and of all its children, the ended ones too."""
    times = process.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in process.children():
        own = child.cpu_times()
        total += own.user + own.system
    return total


def slowness() -> float:
    """Return how many times as long this machine works as that on which the prices were measured, or 1."""
    started = time.thread_time()
    sum(hash(str(number)) for number in range(200_000))
    return max(1.0, (time.thread_time() - started) / 0.025)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in LONGEST else ()) for name in ATTACKS]
)
def test_attack_is_answered_and_harms_nobody(
    address: str, bystander: Bystander, frontend: psutil.Process, name: str
) -> None:
    before_s = cpu_s(frontend)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        attack = [
            pool.submit(send, address, ATTACKS[name], number, HOSTILE) for number in range(NUM_REQUESTS)
        ]
        assert bystander.ask() == bystander.answers
        statuses = {each.result() for each in attack}
    assert statuses <= ATTACKS[name].statuses | {429}
    price_s = _OWN_CPU_S + NUM_REQUESTS * ATTACKS[name].cpu_s
    assert cpu_s(frontend) - before_s < slowness() * price_s
    assert bystander.ask() == bystander.answers


def test_headers_without_end_are_refused(
    address: str, bystander: Bystander, frontend: psutil.Process
) -> None:
    before = frontend.memory_info().rss
    answer = flood_headers(address, 24 << 20)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    assert frontend.memory_info().rss - before < 64 << 20
    assert bystander.ask() == bystander.answers


def test_the_frontend_is_still_the_same_process(frontend: psutil.Process, tmp_path: Path) -> None:
    assert frontend.is_running()
    assert frontend.status() != psutil.STATUS_ZOMBIE
