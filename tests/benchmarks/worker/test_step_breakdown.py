"""The parts of a recorded step: they are named, add up, and have the work that their operands say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.figures import Figure
from benchmarks.worker.recorded_calls import GROUPS, OTHER, STATES, Call, CallTimes, Step, Work, call_by_call
from benchmarks.worker.session import RunnerSession
from benchmarks.worker.step_breakdown import measure_decode, measure_prefill
from tests.worker.models.checkpoints import make_runner, save_checkpoint
from tests.worker.models.families import FAMILIES
from triptych_kernels.cpu.compile import SOURCES
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.machine import Rates
from triptych_services.worker.runner.base import Runner

RATES = Rates(float32=100, bfloat16=200, int16=200, int8=400, memory=20)
QUANTIZED = {"in_features": 576, "out_features": 1000, "bits": 4, "affine": 1, "input_bits": 8}


def test_every_kernel_of_a_step_has_a_group() -> None:
    text = "".join(path.read_text() for path in SOURCES.rglob("*.cpp"))
    kernels = set(re.findall(r"^TRIPTYCH_KERNEL\((\w+),", text, re.MULTILINE))
    assert "linear" in kernels
    unknown = {name for name in kernels if Call(name, {}).group(0) == OTHER}
    assert all(name.startswith("pack_") for name in unknown)  # weights, at the start


@pytest.mark.parametrize(
    ("kernel", "out_features", "group"),
    [
        ("quantized_linear", 576, "products"),
        ("norm_quantized_linear", 576, "products"),
        ("quantized_linear", 49152, "head"),
        ("rotary_attention", 0, "attention"),
        ("write_kv", 0, "norms, rotary, KV writes"),
        ("sample", 0, "sampling"),
        ("no_such", 0, OTHER),
    ],
)
def test_a_call_is_grouped_by_what_its_name_contains(kernel: str, out_features: int, group: str) -> None:
    assert Call(kernel, {"linear_out_features": out_features}).group(49152) == group


def test_the_work_of_a_product_is_that_of_its_weights() -> None:
    work = Call("quantized_linear", QUANTIZED).work("products", 8, Step(0, 0))
    assert work == Work(2 * 8 * 576 * 1000, 576 * 1000 * 5 / 8, "int8")  # 4 bits, and 32 per group of 32
    bfloat16 = Call("linear", {"dtype": 1, "in_features": 10, "out_features": 10})
    assert bfloat16.work("head", 1, Step(0, 0)) == Work(200, 200, "bfloat16")
    widened = Call("widened_linear", {"linear_dtype": 0, "linear_in_features": 10, "linear_out_features": 10})
    assert widened.work("products", 1, Step(0, 0)) == Work(200, 200, "float32")


def test_the_work_of_attention_is_that_of_the_step() -> None:
    sizes = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    call = Call("paged_attention", {"dtype": 0, "cache_dtype": 2, **sizes})
    assert call.work("attention", 1, Step(keys=10, pairs=30)) == Work(
        4 * 30 * 9 * 64, 2 * 10 * 3 * 64, "float32"
    )


def test_a_field_of_a_struct_inside_is_found_unless_it_is_ambiguous() -> None:
    call = Call("joined", {"first_size": 1, "second_size": 2, "norm_eps": 0.5})
    assert (call.find("size"), call.find("eps"), call.find("dtype")) == (None, 0.5, None)
    assert call.work("products", 1, Step(1, 1)) == call.work("attention", 1, Step(1, 1)) == Work()


def test_the_slower_of_computing_and_reading_is_the_limit() -> None:
    assert Work(4e9, 1e9, "int8").limit_s(RATES) == 1e9 / 20e9
    assert Work(400e9, 1e9, "int8").limit_s(RATES) == 1.0
    assert Work(400e9, 1e9, "int8").limit_s(replace(RATES, int8=0.0)) == 0.0  # no such product was measured


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    if not isa():
        pytest.skip("no native kernels are built for this processor: nothing is recorded")
    save_checkpoint(FAMILIES["Llama"].create(), tmp_path)
    return make_runner(tmp_path)


def parts(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name.partition(": ")[2]: figure for figure in figures}


def test_the_parts_of_a_step_are_all_of_it(runner: Runner) -> None:
    figures = parts(list(measure_prefill(runner, "none, prefill of 12", RATES, 12)))
    assert figures.keys() == {"step", *GROUPS, "Python"} - {OTHER, STATES}
    shares = [float(figure.note.partition("%")[0]) for name, figure in figures.items() if name != "step"]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert figures["products"].limit is not None
    decode = parts(list(measure_decode(runner, "none, 2 rows", RATES, 2, 7, 3)))
    assert decode.keys() == figures.keys()


def test_tokens_are_the_same_call_by_call(runner: Runner) -> None:
    def tokens() -> list[list[int]]:
        session = RunnerSession(runner)
        session.restart()
        session.prefill([session.row(slot, 5, num_blocks=4) for slot in range(3)])
        return [session.launch().wait().token_ids.tolist() for _ in range(3)]

    whole = tokens()
    with call_by_call(CallTimes()):
        assert tokens() == whole
    assert len({token for step in whole for token in step}) > 1
