"""The arithmetic that is chosen for a machine, in words, and the instruction set that is asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.tiny import tiny_architecture
from triptych.config import EngineConfig, WorkerConfig
from triptych.errors import ConfigError
from triptych_kernels.cpu import library, machine
from triptych_kernels.cpu.arithmetic import ARITHMETIC
from triptych_kernels.cpu.library import isa, unused_isas, usable_isas
from triptych_kernels.cpu.machine import MachineRates, Rates, keep_rates
from triptych_services.worker.context import machine as examination
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.machine import (
    describe_arithmetic,
    describe_rates,
    examine_machine,
    measured_rates,
)


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_isa_to_rates", {})
    monkeypatch.setattr(library, "_wanted", [])
    monkeypatch.setattr(library, "_refused", {})
    monkeypatch.setenv("TRIPTYCH_MACHINE_DIR", str(tmp_path))


def test_a_rate_that_was_not_measured_is_no_rate_of_0() -> None:
    one = Rates(float32=100.0, int16=140.0)
    words = describe_arithmetic(MachineRates("avx512", 2, one, one), ARITHMETIC["avx512"])
    assert "0.0 times" not in "".join(words.values())
    assert "are not measured" in words["q4"]
    words = describe_arithmetic(MachineRates("avx2"), ARITHMETIC["avx2"])
    assert words["q4"] == "exact products of integers, inputs rounded to 8 bits: for avx2; not measured"
    assert "inputs rounded to 16 bits" in words["q8"]
    assert "not measured yet" in describe_rates(MachineRates("avx2"))


def test_measured_rates_are_compared() -> None:
    one = Rates(float32=100.0, int16=140.0, int8=280.0)
    words = describe_arithmetic(MachineRates("avx2_vnni", 2, one, one), ARITHMETIC["avx2_vnni"])
    assert "2.0 times the rate of 16 bits" in words["q4"]
    assert words["none"].startswith("float32, weights widened")


needs_kernels = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")


@needs_kernels
def test_a_start_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "measure_rates", lambda num_threads: pytest.fail("a start measures"))
    assert not examine_machine().is_measured
    resolve_config(EngineConfig(worker=WorkerConfig(device="cpu")), tiny_architecture())


@pytest.mark.thorough
@needs_kernels
def test_rates_decide_nothing_and_warn(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engine = EngineConfig(worker=WorkerConfig(device="cpu"))
    before = resolve_config(engine, tiny_architecture(dtype="bfloat16"))
    odd = Rates(float32=100, bfloat16=1e-3 if ARITHMETIC[isa()].prefers_bfloat16 else 1e4)
    keep_rates(MachineRates(isa(), 2, odd, odd), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert resolve_config(engine, tiny_architecture(dtype="bfloat16")) == before
    assert "products of bfloat16 are" in caplog.text


@pytest.mark.thorough
@needs_kernels
def test_only_a_quiet_measurement_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measure(num_threads: int) -> MachineRates:
        asked.append(num_threads)
        one = Rates(float32=100)
        return MachineRates(isa(), 2, one, one, "others computed" if len(asked) == 1 else "")

    monkeypatch.setattr(examination, "measure_rates", measure)
    found = []
    for _ in range(3):
        found.append(measured_rates("auto").disturbance)
        machine._isa_to_rates.clear()  # as in the next process
    assert (found, len(asked)) == (["others computed", "", ""], 2)


@pytest.mark.thorough
@pytest.mark.skipif(len(usable_isas()) < 2, reason="there is no narrower instruction set")
def test_the_instruction_set_of_the_config_serves_and_decides_precision() -> None:
    narrowest = usable_isas()[-1]
    worker = WorkerConfig(device="cpu", instruction_set=narrowest)
    config = resolve_config(EngineConfig(worker=worker), tiny_architecture(dtype="bfloat16"))
    assert isa() == narrowest
    assert config.dtype == ("bfloat16" if ARITHMETIC[narrowest].prefers_bfloat16 else "float32")
    assert f"{narrowest} is asked for" in unused_isas().values()
    resolve_config(EngineConfig(worker=WorkerConfig(device="cpu")), tiny_architecture())
    assert isa() == usable_isas()[0]


def test_an_instruction_set_that_is_not_there_names_those_that_are() -> None:
    engine = EngineConfig(worker=WorkerConfig(device="cpu", instruction_set="sse9"))
    usable = ", ".join(("auto", *usable_isas()))
    with pytest.raises(
        ConfigError, match=f"worker.instruction_set: sse9 is not usable here; usable are {usable}"
    ):
        resolve_config(engine, tiny_architecture())


@needs_kernels
def test_an_instruction_set_with_wrong_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(directory: Path) -> None:
        library.refuse(usable_isas()[-1], "linear, Q4_0 differs")

    monkeypatch.setattr(examination, "check_isas", check)
    with pytest.raises(
        ConfigError, match=f"{usable_isas()[-1]} is not usable here, since linear, Q4_0 differs"
    ):
        examine_machine(usable_isas()[-1])


CHECK_BESIDE_GRPC = """
import triptych_services.worker  # first, as in a worker's process
import asyncio, grpc.aio
from triptych_kernels.cpu.library import usable_isas
from triptych_kernels.cpu.self_check import find_problem

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    checks = asyncio.create_task(asyncio.to_thread(lambda: [find_problem(usable_isas()[0]) for _ in range(6)]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        while not checks.done():
            try:
                await channel.unary_unary("/nothing/there")(b"")
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.001)
    print(set(checks.result()))

asyncio.run(main())
"""


@needs_kernels
@pytest.mark.thorough
@pytest.mark.skipif(usable_isas()[:1] != ("amx",), reason="only kernels for AMX are tried in a child process")
def test_a_child_that_tries_kernels_does_not_die_of_calls_that_are_made_meanwhile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK_BESIDE_GRPC], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "{''}\n", done.stdout
