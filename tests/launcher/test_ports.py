"""Which ports a local stack takes, and what is said where they cannot be had."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from triptych.config import EngineConfig
from triptych.config.loader import given_values, load_config
from triptych.errors import ConfigError
from triptych.launcher.ports import check_ports, with_free_internal_ports, with_free_ports


def listening(stack: contextlib.ExitStack, host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = stack.enter_context(socket.create_server((host, 0), family=family))
    return held.getsockname()[1]


def config_of(**frontend: int) -> EngineConfig:
    config = with_free_ports(EngineConfig())
    return replace(config, frontend=replace(config.frontend, **frontend))


def test_all_busy_ports_are_named_at_once():
    with contextlib.ExitStack() as stack:
        first, second, unused = listening(stack), listening(stack), listening(stack)
        config = config_of(port=first, http_port=second, admin_http_port=unused)
        with pytest.raises(ConfigError) as caught:
            check_ports(config)
        assert str(caught.value) == (
            f"ports that cannot be used: frontend.port 127.0.0.1:{first} (in use), "
            f"frontend.http_port 127.0.0.1:{second} (in use); end what listens there, perhaps another stack, "
            "or choose other ports: 0 is any free one"
        )
        check_ports(replace(config, frontend=replace(config.frontend, port=0, serve_http=False)))
    check_ports(config)  # nothing of it is held afterwards


def test_a_port_that_is_given_twice_is_found():
    with contextlib.ExitStack() as stack:
        free = listening(stack)
    with pytest.raises(ConfigError, match=rf"frontend\.http_port 127\.0\.0\.1:{free} \(in use\)"):
        check_ports(config_of(admin_port=free, http_port=free))


def test_an_address_that_is_not_ours_is_named():
    config = config_of(port=5000)
    config = replace(config, frontend=replace(config.frontend, host="203.0.113.7"))
    with pytest.raises(
        ConfigError,
        match=r"frontend\.port 203\.0\.113\.7:5000 \(no address of this machine\), .*; 0\.0\.0\.0",
    ):
        check_ports(config)


def test_internal_ports_are_free_unless_they_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_WORKER_PORT", "50053")
    file = tmp_path / "config.yaml"
    file.write_text("engine: {port: 50052}\n")

    def ports(**sources):
        config = with_free_internal_ports(load_config(**sources), given_values(**sources))
        assert config.frontend.port == 50051
        return config.engine.port, config.worker.port

    assert ports() == (0, 50053)
    assert ports(file=file) == (50052, 50053)
    assert ports(flags={"engine.port": "50052"}, env={}) == (50052, 0)
    assert ports(env={}) == (0, 0)


def test_serve_says_so_before_anything_is_started():
    with contextlib.ExitStack() as stack:
        busy = [listening(stack) for _ in range(3)]
        names = ("frontend.port", "frontend.http_port", "engine.metrics_port")
        flags = [f"--{name.replace('_', '-')}={port}" for name, port in zip(names, busy, strict=True)]
        ended = subprocess.run(
            [sys.executable, "-m", "triptych.cli", "serve", "--sim", *flags],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    for name, port in zip(names, busy, strict=True):
        assert f"{name} 127.0.0.1:{port} (in use)" in ended.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["/no/such/model"],
            1,
            "no such directory or .gguf file, and not a hub id; `embedded` is always there",
        ),
        (["--sim", "--frontend.api-keys-file=/no/such"], 2, "; `triptych keys new NAME` writes an entry"),
        (["--sim", "--tls.certificate=/no/such.pem"], 2, "tls.key: needed with tls.certificate"),
        (["--sim", "--frontend.port=99999"], 2, "is out of range, allowed is >= 0 and <= 65535"),
        (["--sim", "--frontend.host=203.0.113.7"], 2, "(no address of this machine); 0.0.0.0 is all of them"),
    ],
)
def test_serve_says_what_to_do_in_one_line(words, code, told):
    free = [
        f"--{leaf}.{name}=0" for leaf in ("frontend", "engine", "worker") for name in ("port", "metrics-port")
    ]
    free += ["--frontend.admin-port=0", "--frontend.http-port=0"]
    ended = subprocess.run(
        [sys.executable, "-m", "triptych.cli", "serve", *free, *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "", 1), ended.stderr
    assert told in ended.stderr
