"""The Makefile: words reach the programs as they were typed, set-up happens when it must, help tells all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.facts import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
SHOW_ARGUMENTS = "#!/bin/sh\nprintf '%s\\0' \"$@\"\n"
SAY_NOTHING = "#!/bin/sh\n"


@pytest.fixture
def clone(tmp_path):
    """A clone in which everything is set up, with programs that show what they are called with."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "requirements/dev.txt", "tools/setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for program, text in (("triptych", SHOW_ARGUMENTS), ("python", SAY_NOTHING)):
        (tmp_path / ".venv/bin" / program).write_text(text)
        (tmp_path / ".venv/bin" / program).chmod(0o755)
    for stamp in (".installed-runtime", ".installed-dev"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Without the variables by which an outer make would hand its own options down.
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def arguments_of_triptych(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    "prompt",
    [
        'What\'s the capital of "France"?',
        "It costs $5, or $HOME, or $$",
        "$(shell touch pwned) `touch pwned` $(touch pwned)",
        "unbalanced $( and ${ and '",
        "two\nlines",
        "a # b = c : d ; e | f & g > h \\",
        "你好, 🙂",
    ],
)
def test_a_prompt_reaches_the_demo_as_it_was_typed(clone, prompt):
    assert arguments_of_triptych(make(clone, "demo", f"PROMPT={prompt}")) == ["demo", "--prompt", prompt]
    assert arguments_of_triptych(make(clone, "demo", PROMPT=prompt)) == ["demo", "--prompt", prompt]
    assert not (clone / "pwned").exists()


def test_the_demo_has_a_prompt_of_its_own(clone):
    assert arguments_of_triptych(make(clone, "demo")) == [
        "demo",
        "--prompt",
        "What is the capital of France?",
    ]


def test_serve_takes_a_model_and_more_arguments(clone):
    assert arguments_of_triptych(make(clone, "serve")) == ["serve", "embedded"]
    served = make(clone, "serve", "MODEL=/my models/it's one", "ARGS=--frontend.port=0 --log.level=debug")
    assert arguments_of_triptych(served) == [
        "serve", "/my models/it's one", "--frontend.port=0", "--log.level=debug",
    ]  # fmt: skip


@pytest.mark.parametrize("changed", ["pyproject.toml", "setup.py", "requirements/dev.txt", "tools/setup.py"])
def test_the_set_up_is_redone_when_what_it_is_made_of_changes(clone, changed):
    assert "tools/setup.py" not in make(clone, "-n", "serve").stdout
    os.utime(clone / changed)
    later = os.stat(clone / changed).st_mtime - 10
    for stamp in (".installed-runtime", ".installed-dev"):
        os.utime(clone / ".venv" / stamp, (later, later))
    assert "tools/setup.py runtime" in make(clone, "-n", "serve").stdout
    assert "tools/setup.py dev" in make(clone, "-n", "test").stdout


def test_without_a_python_that_will_do_it_says_what_to_install(clone):
    (clone / ".venv/.installed-runtime").unlink()
    result = make(clone, "setup", "PYTHON=")
    assert result.returncode != 0
    assert "python3-venv" in result.stderr


def test_the_embedded_model_is_not_fetched_for_another_one(clone):
    assert "triptych.hub" in make(clone, "-n", "serve").stdout
    assert "triptych.hub" not in make(clone, "-n", "serve", "MODEL=/my/model").stdout


def test_slow_tests_run_where_all_are_asked_for_and_arguments_come_last(clone):
    quick, every = (make(clone, "-n", name, "ARGS=-n0 -k health").stdout for name in ("test", "test-all"))
    assert '-m "not gpu and not slow and not thorough" -n0 -k health' in quick
    assert '-m "not gpu" --hypothesis-profile=random -n0 -k health' in every


def test_help_names_every_target(clone):
    shown = set(re.findall(r"^  ([a-z-]+) ", make(clone).stdout, re.MULTILINE))
    declared = {
        name for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE) for name in line.split()
    }
    assert declared - shown == {"help", "fix-protos"}  # the latter is an alias of protos


def test_continuous_integration_runs_what_a_developer_runs():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().rstrip().endswith("make ci")
    recipe = re.search(r"^ci: ## .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1].splitlines()
    assert [line.split()[-1] for line in recipe] == ["verify", "test", "test-thorough"]
    assert all(line.startswith("\t@$(MAKE) ") and "||" not in line for line in recipe), "and no second try"
    verify = re.search(r"^verify: ([a-z -]+) ##", MAKEFILE, re.MULTILINE)[1].split()
    assert set(verify) == set(re.findall(r"^(verify-[a-z]+):", MAKEFILE, re.MULTILINE))
