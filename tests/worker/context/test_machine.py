"""The arithmetic that is chosen for a machine, in words."""

from __future__ import annotations

from triptych_kernels.cpu.machine import MachineRates, Rates
from triptych_services.worker.context.machine import describe_arithmetic


def test_a_rate_that_was_not_measured_is_no_rate_of_0() -> None:
    avx2 = MachineRates("avx2", 2, Rates(float32=100.0, int16=140.0), Rates(float32=200.0, int16=280.0))
    assert "0.0 times" not in describe_arithmetic(avx2)["q4"]
    assert "was not measured" in describe_arithmetic(avx2)["q4"]


def test_measured_rates_are_compared() -> None:
    one = Rates(float32=100.0, int16=140.0, int8=280.0)
    assert (
        "2.0 times the rate of 16 bits" in describe_arithmetic(MachineRates("avx2_vnni", 2, one, one))["q4"]
    )
