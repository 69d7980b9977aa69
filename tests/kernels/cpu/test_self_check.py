"""Libraries that compute wrongly or die are refused, and the next narrower instruction set is used."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from triptych_kernels.cpu import library, program, self_check
from triptych_kernels.cpu.call_list import CallList
from triptych_kernels.cpu.compile import AMX_EMULATED, build_emulated
from triptych_kernels.cpu.launch import Kernel, find_kernel
from triptych_kernels.cpu.library import (
    isa,
    isas_of_processor,
    refused_isas,
    threads_in_use,
    usable_isas,
    use_threads,
)
from triptych_kernels.cpu.machine_files import check_isas
from triptych_kernels.cpu.self_check import find_problem

pytestmark = pytest.mark.skipif(not isa(), reason="there are no native kernels")
KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

DYING = """
extern "C" long long die(const void*, long long) { __builtin_trap(); }
extern "C" long long hang(const void*, long long) { for (;;) asm volatile(""); }
"""


@pytest.fixture(autouse=True)
def _nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_refused", {})
    monkeypatch.setattr(library, "_wanted", [])


@pytest.fixture
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Kernel], object], str], None]:
    """Return a function that puts another function in the place of one library's kernel.

    No child process runs a function of Python: where another thread held the interpreter's lock at the fork, the child
    would wait for it forever.
    """

    look_up, run_in_child = CallList._function, CallList.run_in_child
    kept: list[object] = []

    def run(self: CallList, counts: Mapping[str, int]) -> str:
        return "" if any(isinstance(function, KERNEL) for function in kept) else run_in_child(self, counts)

    def change(name: str, create: Callable[[Kernel], object], bad_isa: str) -> None:
        def find(self: CallList, kernel: str) -> int:
            if (isa(), kernel) != (bad_isa, name):
                return look_up(self, kernel)
            kept.append(create(find_kernel(bad_isa, name)))
            return ctypes.cast(kept[-1], ctypes.c_void_p).value or 0  # type: ignore[arg-type]

        monkeypatch.setattr(CallList, "_function", find)
        monkeypatch.setattr(CallList, "run_in_child", run)

    return change


def off_by_little(kernel: Kernel) -> object:
    """Return the kernel with 0.25 added to the first element of its result, which is float32."""
    place = next(i for i, field in enumerate(kernel.fields) if field in ("out", "linear_out"))

    @KERNEL
    def compute(arguments: int, rows: int) -> int:
        failure: int = kernel.function(arguments, rows)
        address = ctypes.c_void_p.from_address(arguments + 8 * place).value
        assert address is not None
        ctypes.c_float.from_address(address).value += 0.25
        return failure

    return compute


@pytest.mark.parametrize("name", usable_isas())
def test_libraries_that_are_right_have_no_problem(name: str) -> None:
    use_threads(3)
    assert find_problem(name) == ""
    assert threads_in_use() == 3
    use_threads(1)


KERNEL_TO_CHECK = {
    **dict.fromkeys(("linear", "widened_linear", "quantized_linear"), "linear"),
    "paged_attention": "attention",
    "causal_conv": "causal_conv",
    "scan_heads": "gated_delta_scan",
    "selective_scan": "selective_scan",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kernel", KERNEL_TO_CHECK)
def test_a_kernel_that_is_wrong_is_named(
    replace_kernel: Callable[[str, Callable[[Kernel], object], str], None], kernel: str
) -> None:
    replace_kernel(kernel, off_by_little, isa())
    problem = find_problem(isa())
    assert "differs from plain torch by up to 0.2" in problem
    assert problem.startswith(f"{KERNEL_TO_CHECK[kernel]}, ")


@pytest.mark.skipif(len(usable_isas()) < 2, reason="there is no narrower instruction set")
def test_the_next_narrower_isa_is_used_and_the_result_is_kept(
    replace_kernel: Callable[[str, Callable[[Kernel], object], str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    widest, narrower = usable_isas()[:2]
    replace_kernel("linear", off_by_little, widest)
    check_isas(tmp_path)
    assert isa() == narrower
    (warning,) = caplog.messages
    assert f"{widest} is not used: linear, torch.float32 differs" in warning
    assert library.unused_isas()[widest] in warning

    library._refused.clear()  # as in the next process
    monkeypatch.setattr(self_check, "find_problem", lambda isa: pytest.fail("it is known"))
    check_isas(tmp_path)
    assert isa() == narrower


def test_without_a_library_that_is_right_plain_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "find_problem", lambda isa: f"{isa} is wrong")
    check_isas(tmp_path)
    assert isa() == ""
    assert set(refused_isas()) == set(usable_isas())


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(isa: str, kernel: str) -> Kernel:
        raise RuntimeError(f"{isa} has no kernel {kernel!r}")

    monkeypatch.setattr(program, "find_kernel", find)
    assert find_problem(isa()) == f"the library does not fit: {isa()} has no kernel 'linear'"


def test_a_check_that_cannot_run_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(isa: str) -> str:
        raise MemoryError("none left")

    monkeypatch.setattr(self_check, "find_problem", fail)
    check_isas(tmp_path)
    assert isa() == usable_isas()[0]
    assert "cannot be checked (none left)" in caplog.text


@pytest.mark.skipif(len(usable_isas()) < 2, reason="there is no narrower instruction set")
def test_another_instruction_set_is_no_stand_in_for_one_that_is_wanted(
    replace_kernel: Callable[[str, Callable[[Kernel], object], str], None], tmp_path: Path
) -> None:
    narrower = usable_isas()[1]
    replace_kernel("paged_attention", lambda kernel: KERNEL(lambda arguments, rows: 0), narrower)
    library.want_isa(narrower)
    assert isa() == narrower
    check_isas(tmp_path)
    assert (isa(), set(refused_isas())) == ("", {narrower})


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let emulated AMX be the widest instruction set. Its library has products only."""
    if "avx512" not in isas_of_processor() or shutil.which("g++") is None:
        pytest.skip("the emulation needs a processor with AVX-512 and g++")
    build_emulated()
    usable = (AMX_EMULATED, *usable_isas())
    monkeypatch.setattr(library, "usable_isas", lambda: usable)
    for others in ("_attention_checks", "_state_checks"):
        monkeypatch.setattr(self_check, others, lambda random: ())


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return a library whose kernels die and hang."""
    folder = tmp_path_factory.mktemp("dying")
    (folder / "dying.cpp").write_text(DYING)
    command = ["g++", "-shared", "-fPIC", str(folder / "dying.cpp"), "-o", str(folder / "dying.so")]
    subprocess.run(command, check=True, timeout=300)
    return ctypes.CDLL(str(folder / "dying.so"))


@pytest.mark.thorough
def test_amx_that_works_is_used(emulated: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_isas(tmp_path)
    assert (isa(), caplog.messages) == (AMX_EMULATED, [])


@pytest.mark.thorough
def test_amx_that_kills_the_process_kills_only_a_child(
    emulated: None,
    replace_kernel: Callable[[str, Callable[[Kernel], object], str], None],
    dying: ctypes.CDLL,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replace_kernel("linear", lambda kernel: dying.die, AMX_EMULATED)
    check_isas(tmp_path)
    assert isa() == usable_isas()[0]
    assert f"{AMX_EMULATED} is not used: linear, torch.float32 dies by SIGILL" in caplog.text


@pytest.mark.thorough
def test_amx_that_is_wrong_is_not_used(
    emulated: None,
    replace_kernel: Callable[[str, Callable[[Kernel], object], str], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replace_kernel("quantized_linear", off_by_little, AMX_EMULATED)
    check_isas(tmp_path)
    assert isa() == usable_isas()[0]
    assert "linear, Q4_0 differs" in caplog.text
