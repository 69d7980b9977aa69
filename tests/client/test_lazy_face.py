"""`import triptych` costs nothing, and offers what a program needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import triptych

HEAVY = {"grpc", "torch", "transformers", "numpy", "yaml", "tqdm", "asyncio", "google.protobuf"}


def modules_after(program: str) -> set[str]:
    program += f"\nimport sys; print(*sorted({HEAVY!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_import_triptych_imports_nothing_heavy():
    assert modules_after("import triptych") == set()


def test_sampling_params_need_no_grpc():
    assert "grpc" not in modules_after("from triptych import SamplingParams; SamplingParams(n=2)")


def test_llm_brings_no_model_library():
    assert modules_after("from triptych import LLM, AsyncLLM") & {"torch", "transformers"} == set()


@pytest.mark.parametrize("name", triptych.__all__)
def test_every_public_name_is_there(name):
    assert getattr(triptych, name) is getattr(triptych, name)
    assert name in dir(triptych)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="Llm"):
        _ = triptych.Llm
