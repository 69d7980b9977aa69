"""Other systems and processors than Linux on x86-64: what they say they can, and that everything imports without."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from triptych_kernels.cpu import build, compile, library

PROGRAM = """
import mmap, os, platform, sys
import torch
from pathlib import Path

system, machine = sys.argv[1:]
sys.platform = system
platform.machine = lambda: machine
is_file, read_text = Path.is_file, Path.read_text

def no_proc(path):
    if str(path).startswith("/proc") and system != "linux":
        raise FileNotFoundError(path)
    return path

Path.read_text = lambda path, *args: read_text(no_proc(path), *args)
Path.is_file = lambda path: not (str(path).startswith("/proc") and system != "linux") and is_file(path)
if system != "linux":
    for name in ("sched_getaffinity", "register_at_fork"):
        delattr(os, name)
    for name in ("MADV_HUGEPAGE", "MAP_NORESERVE", "MAP_POPULATE"):
        if hasattr(mmap, name):
            delattr(mmap, name)

import importlib, pkgutil
import triptych_kernels
for folder in ("cpu", "ops", "torch", "reference", "weights"):
    package = importlib.import_module(f"triptych_kernels.{folder}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"triptych_kernels.{folder}.{module.name}")

from triptych_kernels.cpu import build, library, memory
from triptych_kernels.ops import linear
assert (library.isa(), library.usable_isas(), library.amx_refusal()) == ("", (), "")
library.use_threads(2)
assert not memory.zeros_in_huge_pages((1000, 1000), torch.float32).any()
assert linear(torch.ones(2, 3), torch.ones(5, 3)).eq(3).all()
build.main([])
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "riscv64"), ("win32", "AMD64")], ids=["RISC-V", "Windows"]
)
def test_plain_torch_serves_where_no_kernels_are_written_for(system: str, machine: str) -> None:
    command = [sys.executable, "-c", PROGRAM, system, machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    says = f"native kernels: none, since they are written for x86-64 and 64-bit ARM and this is {machine}"
    assert line.startswith(says)


def test_without_a_compiler_the_build_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stand_in = tmp_path / "clang++"  # as macOS has one, which asks to install the real one
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compile.platform, "machine", lambda: "arm64")
    with pytest.raises(SystemExit, match=r"none, since neither g\+\+ nor clang\+\+ is found"):
        build.main(["--all"])
    monkeypatch.setattr(library, "processor_flags", lambda: {"asimd"})
    monkeypatch.setattr(library, "usable_isas", lambda: ())
    build.main([])
    assert "none, since neither g++ nor clang++ is found" in capsys.readouterr().out
    monkeypatch.setattr(library, "usable_isas", lambda: ("neon",))
    build.main([])
    assert "as installed, without a compiler; this machine uses neon" in capsys.readouterr().out


def test_building_for_all_needs_no_torch(tmp_path: Path) -> None:
    stand_in = tmp_path / "torch.py"
    stand_in.write_text("raise ImportError('torch is not there when a wheel is built')\n")
    command = [sys.executable, compile.__file__]
    env = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert "native kernels: none, since neither g++ nor clang++" in done.stderr


def test_the_build_makes_what_this_processor_has_and_all_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    built: list[list[str]] = []

    def link(compiler: str, sources: Sequence[Path], isas: Mapping[str, Sequence[str]]) -> None:
        built.append(list(isas))
        for isa in isas:
            compile.library_path(isa).touch()

    monkeypatch.setattr(compile, "LIBRARIES", tmp_path)
    monkeypatch.setattr(compile, "DIGEST", tmp_path / "DIGEST")
    for module in (compile, library):
        monkeypatch.setattr(module, "library_path", lambda isa, _=None: tmp_path / f"{isa}.so")
    monkeypatch.setattr(compile, "find_compiler", lambda: "g++")
    monkeypatch.setattr(compile, "_knows", lambda compiler, flags: True)
    monkeypatch.setattr(compile, "_digest", lambda compiler, sources, flags: "of these sources")
    monkeypatch.setattr(compile, "_build", link)
    monkeypatch.setattr(compile.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "processor_flags", lambda: {"avx2", "fma", "f16c", "avx_vnni"})
    build.main([])
    build.main([])
    assert built == [["avx2_vnni", "avx2"]]
    build.main(["--all"])
    assert built[1:] == [["amx", "avx512_bf16", "avx512_vnni", "avx512"]]
    monkeypatch.setattr(compile, "_digest", lambda compiler, sources, flags: "of other sources")
    build.main([])
    assert built[2:] == [["avx2_vnni", "avx2"]]
    assert not (tmp_path / "amx.so").exists()
    monkeypatch.setattr(library, "processor_flags", lambda: {"sse2"})
    build.main([])
    assert "none, since this processor has no avx2, f16c, fma" in capsys.readouterr().out


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the source below is for x86-64")
def test_a_source_that_one_other_instruction_set_lacks_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "dot.cpp"
    monkeypatch.setattr(compile, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "build_for_this_processor", lambda: None)
    monkeypatch.setattr(library, "isas_to_build", lambda: ["amx", "avx2"])
    dot = (
        "#include <immintrin.h>\n__m512i dot(__m512i a, __m512i b) { return _mm512_dpbusd_epi32(a, a, b); }\n"
    )
    source.write_text(f"#ifdef __AVX512VNNI__\n{dot}#endif\n")
    build.main(["--check"])
    assert capsys.readouterr().out.endswith("avx512_bf16, avx512_vnni, avx512, avx2_vnni compile\n")
    source.write_text(f"#ifdef __AVX512F__\n{dot}#endif\n")
    with pytest.raises(
        SystemExit, match=r"(?s)-mavx512vl .*dot\.cpp.* failed:.*target specific option mismatch"
    ):
        build.main(["--check"])


@pytest.mark.parametrize(
    ("processor", "features", "isas"),
    [
        (
            "Graviton 3",
            "fp asimd atomics asimdhp asimddp sve i8mm bf16",
            ("neon_bf16", "neon_dotprod", "neon"),
        ),
        ("Graviton 2", "fp asimd atomics asimdhp asimddp", ("neon_dotprod", "neon")),
        ("Raspberry Pi 4", "fp asimd evtstrm crc32 cpuid", ("neon",)),
    ],
)
def test_arm_uses_the_widest_instruction_set_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processor: str, features: str, isas: tuple[str, ...]
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: {features}\n")
    monkeypatch.setattr(library, "CPUINFO", cpuinfo)
    monkeypatch.setattr(library, "DIGEST", cpuinfo)
    monkeypatch.setattr(library, "library_path", lambda isa: cpuinfo)
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert library.usable_isas.__wrapped__() == isas, processor
    assert library.missing_flags() == []
    assert library.missing_flags({"fp"}) == ["asimd"]


def as_mac(monkeypatch: pytest.MonkeyPatch, machine: str, printed: str) -> None:
    """Let `library` believe that it runs on a Mac whose sysctl prints this."""
    monkeypatch.setattr(library.sys, "platform", "darwin")
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    monkeypatch.setattr(
        library.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, printed)
    )


def test_a_mac_with_an_arm_processor_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"FEAT_DotProd": 1, "FEAT_LSE": 1, "FEAT_LSE2": 1, "FEAT_BF16": 0, "FEAT_I8MM": 0}
    printed = "".join(f"hw.optional.arm.{name}: {has}\n" for name, has in features.items())
    as_mac(monkeypatch, "arm64", printed)
    assert library.processor_flags() == {"asimd", "atomics", "asimddp"}
    as_mac(monkeypatch, "arm64", printed.replace(": 0", ": 1"))
    assert library.processor_flags() == {"asimd", "atomics", "asimddp", "bf16", "i8mm"}


def test_a_mac_with_an_intel_processor_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    as_mac(monkeypatch, "x86_64", "FPU SSE4.2 F16C FMA AVX1.0\nRDWRFSGS BMI1 AVX2 AVX512F\n")
    assert {"avx2", "fma", "f16c", "avx512f"} <= library.processor_flags()
    assert library.missing_flags() == []
