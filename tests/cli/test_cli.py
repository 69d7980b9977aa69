"""The `triptych` command: help, output, exit codes, one line per error."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.test_simulated_stack import FREE_PORTS
from tests.helpers.command import NOBODY, exit_code
from tests.helpers.fake_frontend import SERVICE
from triptych.cli import env
from triptych.cli.streaming import write_now
from triptych.config.api_keys import read_api_keys

COMMANDS = (
    "serve",
    "chat",
    "complete",
    "demo",
    "bench",
    "keys",
    "env",
    "health",
    "admin",
    "completion",
    "run-batch",
)


def test_help_lists_every_command(capsys):
    assert exit_code("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_worth_reading(command, capsys):
    assert exit_code(command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: triptych {command}")
    assert len(text.splitlines()) >= 5


def test_help_imports_nothing_that_takes_time():
    heavy = {"grpc", "numpy", "yaml", "torch", "transformers", "google.protobuf", "asyncio"}
    program = (
        "import sys, triptych.cli as cli\n"
        "try: cli.main(['--help'])\n"
        f"except SystemExit: print(sorted({heavy!r} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [(), ("bogus",), ("completion", "fish"), ("bench", "speed"), ("demo",)])
def test_wrong_usage_exits_with_2(words):
    assert exit_code(*words) == 2


@pytest.mark.parametrize(
    ("words", "usage", "told"),
    [
        (("serv",), "triptych [-h]", "'serv' (choose from"),
        (("serv",), "triptych [-h]", "; did you mean serve?"),
        (
            ("complete", "a", "--temprature", "0.5"),
            "triptych complete",
            "--temprature 0.5; did you mean --temperature?",
        ),
        (("complete", "a", "--temprature=0.5"), "triptych complete", "; did you mean --temperature?"),
        (("serve", "--frontend.portt", "1"), "triptych serve", "; did you mean --frontend.port?"),
        (("bench", "serve", "--request-rte", "1"), "triptych bench serve", "; did you mean --request-rate?"),
        (("bench", "sreve"), "triptych bench", "; did you mean serve?"),
        (("admin", "sleep", "--mode", "abbort"), "triptych admin sleep", "; did you mean abort?"),
        (("complete", "a", "--qqqq"), "triptych complete", "unrecognized arguments: --qqqq\n"),
    ],
)
def test_wrong_words_show_the_commands_own_usage_and_what_is_meant(words, usage, told, capsys):
    assert exit_code(*words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: {usage}")
    assert told in shown


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("triptych 0.")


def test_complete_prints_the_answer_and_sends_only_what_was_said(frontend, capsys):
    assert exit_code("complete", "a b", "--address", frontend.address, "--max-tokens", "9", "--stats") == 0
    shown = capsys.readouterr()
    assert shown.out == " a b\n"
    assert "TTFT" in shown.err
    assert "2 tokens" in shown.err
    [request] = frontend.requests
    assert request.generation.text.text == "a b"
    assert not request.generation.HasField("sampling")
    assert [field.name for field, _ in request.generation.length.ListFields()] == ["max_tokens"]


def test_a_terminal_is_shown_control_characters_and_does_not_obey_them(capsys, monkeypatch):
    write_now("a\x1b[2J\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write_now("a\x1b[2J\r\n\t\x9b\x7fü")
    assert capsys.readouterr().out == "a\x1b[2J\n" + "a␛[2J␍\n\t\ufffd␡ü"


def test_complete_reads_stdin_and_takes_a_chat(frontend, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert (
        exit_code("complete", "-", "--chat", "--address", frontend.address, "--stop", "x", "--stop", "y") == 0
    )
    assert capsys.readouterr().out == " from stdin\n"
    [request] = frontend.requests
    assert request.generation.chat.messages[0].role == "user"
    assert list(request.generation.length.stop) == ["x", "y"]


def test_nobody_at_the_address_is_one_line_that_says_what_to_do(capsys):
    assert exit_code("complete", "a", "--address", NOBODY) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert f"no server answers at {NOBODY}: Connection refused; start one with `triptych serve`" in shown


@pytest.mark.parametrize("command", [("complete", "a", "--address"), ("health",)])
def test_a_proxy_in_the_environment_is_not_asked(command, frontend):
    words = [sys.executable, "-m", "triptych.cli", *command, frontend.address]
    environment = {**os.environ, "http_proxy": f"http://{NOBODY}", "https_proxy": f"http://{NOBODY}"}
    assert (
        subprocess.run(words, env=environment, capture_output=True, timeout=120, check=False).returncode == 0
    )


def test_a_refused_request_is_one_line(frontend, capsys):
    assert exit_code("complete", "", "--address", frontend.address) == 1
    assert capsys.readouterr().err == "triptych complete: prompt: is empty\n"


def test_a_reader_that_leaves_early_is_no_traceback(frontend):
    frontend.token_delay_s = 0.01
    words = [
        sys.executable,
        "-m",
        "triptych.cli",
        "complete",
        "word " * 1000,  # 10 s
        "--address",
        frontend.address,
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 1


def test_health_tells_by_its_exit_code(frontend, capsys):
    assert exit_code("health", frontend.address) == 0
    assert exit_code("health", frontend.address, SERVICE) == 0
    frontend.set_ready(False)
    assert exit_code("health", frontend.address) == 0
    assert exit_code("health", frontend.address, SERVICE) == 1
    assert capsys.readouterr().out.split() == ["SERVING", "SERVING", "SERVING", "NOT_SERVING"]
    assert exit_code("health", frontend.address, "no.such.Service") == 1
    assert exit_code("health", NOBODY, "--timeout-s", "1") == 1
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in shown] == ["NOT_FOUND", "UNAVAILABLE"]


def test_health_imports_no_model_library():
    program = (
        "import sys; from triptych.cli import main\n"
        f"main(['health', {NOBODY!r}])\n"
        "print(sorted({'torch', 'numpy', 'yaml', 'tokenizers', 'fastapi'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "latency", "--rounds", "0"), "--rounds: 0 is out of range"),
        (("bench", "latency", "--address", NOBODY, "--model.dtype", "float32"), "model.dtype: the stack at"),
        (("serve", "--scheduler.max-num-seqs", "-1"), "scheduler.max_num_seqs: '-1' is out of range"),
        (("serve", "a", "--model.model", "b"), "MODEL 'a' and --model.model 'b' disagree"),
        (("serve", "--sim", "--simulation.enabled", "no"), "--sim and --simulation.enabled no disagree"),
        (("serve", "--config", "/no/such.yaml"), "/no/such.yaml"),
    ],
)
def test_bad_options_are_one_line_and_exit_with_2(words, told, capsys):
    assert exit_code(*words) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert told in shown


def test_a_model_that_is_not_there_is_one_line(capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    free_ports = [f"--{name.replace('_', '-')}=0" for name in FREE_PORTS]
    try:
        assert exit_code("serve", "/no/such/model", *free_ports) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "/no/such/model" in shown


def test_env_prints_what_a_system_without_proc_tells(monkeypatch, capsys):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(env, "read_key_values", lambda path: {})
    monkeypatch.setattr(env, "_EXAMINE", "no.such.module")
    assert exit_code("env") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line)
    assert lines["cores"].startswith(f"{os.cpu_count()} usable of ")
    assert lines["memory"].endswith(" GiB")
    assert lines["kernels"].startswith("not examined: ")
    assert "no.such" in lines["kernels"] or "'no'" in lines["kernels"]


def test_env_says_what_the_kernels_do_here(capsys):
    assert exit_code("env", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    kernels = found["kernels"]
    assert found["versions"]["triptych"]
    assert {"none", "attention"} <= kernels["arithmetic"].keys()
    rates = kernels["rates_of_one_thread"]
    assert all(rate > 0 for rate in rates.values())
    assert bool(rates) != bool(kernels["not_measured"])
    assert kernels["instruction_set"] not in kernels["why_not_wider"]


def test_env_lists_rates_and_reasons(monkeypatch, capsys):
    found = {
        "instruction_set": "avx512",
        "why_not_wider": {"amx": "the processor has no amx_tile"},
        "threads": 3,
        "rates_of_one_thread": {"float32": 100.4, "l1": 200.0, "memory": 12.0},
        "rates_of_all_threads": {"float32": 300.0, "l1": 600.0, "memory": 30.0},
        "not_measured": "",
        "arithmetic": {"none": "float32: it is faster"},
        "contradictions": ["bfloat16 is slow"],
        "huge_pages": "always",
    }
    monkeypatch.setattr(env, "_examine", lambda instruction_set: found)
    assert exit_code("env") == 0
    out = capsys.readouterr().out
    for line in (
        ["not", "amx", "the", "processor", "has", "no", "amx_tile"],
        [
            "3",
            "threads",
            "10^9",
            "operations/s:",
            "float32",
            "300;",
            "GB/s",
            "from",
            "l1",
            "600,",
            "memory",
            "30",
        ],
        [
            "1",
            "thread",
            "10^9",
            "operations/s:",
            "float32",
            "100;",
            "GB/s",
            "from",
            "l1",
            "200,",
            "memory",
            "12",
        ],
        ["none", "float32:", "it", "is", "faster"],
        ["warning", "bfloat16", "is", "slow"],
    ):
        assert line in [shown.split() for shown in out.splitlines()]
    disturbed = {"rates_of_one_thread": {}, "rates_of_all_threads": {}, "not_measured": "others compute"}
    monkeypatch.setattr(env, "_examine", lambda instruction_set: {**found, **disturbed})
    assert exit_code("env") == 0
    out = capsys.readouterr().out
    assert ["rates", "not", "measured:", "others", "compute"] in [shown.split() for shown in out.splitlines()]
    assert "operations/s" not in out


def test_env_examines_the_instruction_set_that_is_named(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        env, "_examine", lambda instruction_set: asked.append(instruction_set) or {"problem": "p"}
    )
    assert exit_code("env", "--instruction-set", "avx2") == 0
    assert asked == ["avx2"]


def test_env_prints_versions_and_options_without_importing_torch(monkeypatch):
    program = "import sys; from triptych.cli import main; main(['env']); print('torch' in sys.modules)"
    environment = {**os.environ, "TRIPTYCH_LOG_LEVEL": "debug", "TRIPTYCH_API_KEY": "tk-secret"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines() if " " in line)
    assert lines["python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert lines["TRIPTYCH_LOG_LEVEL"] == "debug"
    assert lines["TRIPTYCH_API_KEY"] == "set"
    assert "secret" not in ended.stdout
    assert "GiB" in lines["memory"]
    assert ended.stdout.splitlines()[-1] == "False"


# completion


def test_a_shell_completes_commands_and_options(capsys, tmp_path):
    assert exit_code("completion", "bash") == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completions(*words: str) -> set[str]:
        program = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            "_shtab_triptych; echo ${COMPREPLY[@]}"
        )
        ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        return set(ended.stdout.split())

    assert completions("triptych", "comp") == {"complete", "completion"}
    assert completions("triptych", "serve", "--scheduler.max-num-s") == {"--scheduler.max-num-seqs"}
    assert {"--top-p", "--top-k"} <= completions("triptych", "complete", "--top")
    for shell in ("zsh", "tcsh"):
        assert exit_code("completion", shell) == 0
        assert "complete" in capsys.readouterr().out


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert exit_code("completion", "bash") == 1
    assert "pip install 'triptych[cli]'" in capsys.readouterr().err


# keys


def test_a_new_key_is_printed_once_and_its_hash_written(tmp_path, capsys):
    file = tmp_path / "keys.yaml"
    assert exit_code("keys", "new", "alice", "--tenant", "acme", "--file", str(file)) == 0
    key = capsys.readouterr().out.strip()
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "1000")
    assert exit_code("keys", "new", "operator", "--admin", *limits, "--file", str(file)) == 0
    alice, operator = read_api_keys(file)
    assert (alice.name, alice.sha256, alice.tenant) == (
        "alice",
        hashlib.sha256(key.encode()).hexdigest(),
        "acme",
    )
    assert (operator.tenant, operator.admin) == ("operator", True)
    assert (operator.requests_per_minute, operator.tokens_per_minute) == (60, 1000)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert exit_code("keys", "new", "alice", "--file", str(file)) == 2
    assert len(read_api_keys(file)) == 2
    capsys.readouterr()
    assert exit_code("keys", "new", "bob") == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    file.write_text(printed["line"].strip())
    (bob,) = read_api_keys(file)
    assert bob.sha256 == hashlib.sha256(printed["key"].strip().encode()).hexdigest()
