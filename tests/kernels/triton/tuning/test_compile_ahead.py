"""Kernels are compiled once, before their launch, and a few of them are enough for steps of all sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

MODELS = ("plain", "q4", "int8", "experts", "experts, q4")
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of `kernels_of_steps`, run with an empty Triton cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.kernels.triton.kernels_of_steps"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_what_was_compiled_ahead_is_found_at_the_launch(found: dict[str, Any]) -> None:
    assert found["ahead"] == 2, "launches that ask for the same are compiled once"
    assert found["at_launch"] == 0


def test_no_launch_finds_a_kernel_that_is_still_being_loaded(found: dict[str, Any]) -> None:
    """Triton would launch it without a function."""
    assert found["found_early"] == 0


def test_a_start_compiles_all_kernels_of_steps(found: dict[str, Any]) -> None:
    of_steps, _ = found["steps"]["plain"]
    assert {
        "_embedding",
        "_norm_whole_rows",
        "_attend_part",
        "_fold_parts",
        "_attend_splits",
        "_choose",
    } <= set(of_steps)
    ahead, late = found["start"]
    assert set(ahead) >= set(of_steps) - {"_fold_parts"}, (
        "whatever the model; this one's context is a single part"
    )
    assert {"_penalize", "_ban", "_bias", "_allow", "_look_up"} <= set(ahead)
    assert late == [], "or the first request of its kind would wait for a compiler"


@pytest.mark.parametrize("model", MODELS)
def test_no_step_compiles_what_a_start_has_not(found: dict[str, Any], model: str) -> None:
    """Otherwise the first request with a step of this size would wait for a compiler, and all others with it."""
    ahead, late = found["steps"][model]
    assert late == []
    assert len(ahead) < 50, "they are to be compiled while weights are read"


def test_nor_where_products_of_few_rows_have_tiles(found: dict[str, Any]) -> None:
    """There are other tiles for one row, for up to 4 and for up to 16."""
    ahead, late = found["few rows"]
    assert late == []
    assert ahead.count("_multiply_few_rows") >= 3 * 2, "plain and with an activation, each of three sizes"
    assert len(ahead) < 50
