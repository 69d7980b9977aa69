"""Engines that are held to an instruction set: by their own ways, and by name where there is none."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.harness.figures import Figure
from benchmarks.peers import __main__ as command
from benchmarks.peers.engines import AVX2, ENGINES, Engine, engines_of_file
from benchmarks.peers.report import text


def held(name: str) -> Engine:
    (engine,) = (engine for engine in ENGINES if engine.name == name)
    assert engine.hold is not None
    return engine.hold(engine)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_HOME", str(tmp_path))


def test_triptych_serves_the_instruction_set() -> None:
    for engine in ENGINES:
        if not engine.is_peer:
            mine = held(engine.name)
            assert dict(mine.options()) == {**engine.options(), "worker.instruction_set": AVX2}
            assert mine.name == engine.name


def test_openvino_is_held_by_both_of_its_variables() -> None:
    variables = held("openvino-q4_1").env((0, 1))
    assert variables["ONEDNN_MAX_CPU_ISA"] == variables["OV_CPU_MAX_ISA"] == "AVX2"


def test_llama_cpp_is_built_without_wider_instructions() -> None:
    engine = held("llama.cpp-q4_0")
    assert engine.environment is not None
    options = " ".join(engine.environment.options)
    assert "-DGGML_AVX2=ON" in options
    assert "AVX512" not in options
    assert str(engine.environment.directory) in engine.options()["bin"]


def test_peers_that_nothing_holds_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure_rounds(engines: list[Engine], *_: object, **__: object) -> list[Figure]:
        measured.extend(engine.name for engine in engines)
        return []

    monkeypatch.setattr(command, "measure_rounds", measure_rounds)
    monkeypatch.setattr(command.models, "vocab_size", lambda model: 10)
    monkeypatch.setattr(Engine, "prepare", lambda engine: "")
    arguments = argparse.Namespace(
        engines=[ENGINES], rows=[], rounds=1, seed=0, install_only=False, instruction_set=AVX2, model=None
    )
    figures = {figure.name: figure for figure in command.measure(arguments)}
    assert set(figures) == {"vllm-bf16: avx2", "onnxruntime-int4: avx2"}
    assert set(measured) == {engine.name for engine in ENGINES} - {"vllm-bf16", "onnxruntime-int4"}
    assert "vllm-bf16: avx2: left out: nothing holds it to avx2" in text(ENGINES, [], figures)
    arguments.instruction_set = "auto"
    assert list(command.measure(arguments)) == []


def test_a_file_is_read_by_all_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    engines = engines_of_file(file)
    assert [engine.name for engine in engines] == ["llama.cpp-file", "triptych-none", "triptych-q4"]
    for engine in engines:
        assert engine.hold is not None
        assert {one.model() for one in (engine, engine.hold(engine))} == {file}
