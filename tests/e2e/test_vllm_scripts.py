"""Programs that are written for vLLM run with only their imports changed, each with a stack of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cores import share_of_cores

SCRIPTS = sorted((Path(__file__).parent / "vllm_scripts").glob("*.py"))
THOROUGH = ("rollouts", "streaming")
"""The scripts that between them touch most; the others are run by `make test-all`. tests/vllm has the quick proof."""


@pytest.mark.model
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            path, id=path.stem, marks=pytest.mark.thorough if path.stem in THOROUGH else pytest.mark.slow
        )
        for path in SCRIPTS
    ],
)
def test_a_script_runs_with_its_imports_changed(script: Path, tmp_path: Path) -> None:
    changed, num_changed = re.subn(
        r"^from vllm\b", "from triptych.vllm", script.read_text(), flags=re.MULTILINE
    )
    assert num_changed >= 1
    program = tmp_path / script.name
    program.write_text(changed)
    unset = ("TRIPTYCH_ADDRESS", "TRIPTYCH_ADMIN_ADDRESS")
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    environment |= {"TRIPTYCH_WORKER_NUM_THREADS": str(share_of_cores())}
    ended = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "generated:" in ended.stdout
    assert "Traceback" not in ended.stderr
