"""The files in config/, and what the options declare about their readers, say what the code does."""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path

import pytest
import yaml

from tools.example_config import EXAMPLE, render
from triptych.config import EngineConfig, TlsConfig
from triptych.config.loader import iter_options, load_config, rank_config, shared_config
from triptych.config.option import Option
from triptych.config.step_size import size_for_device

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = list(iter_options())
KEYS = [option.key for option in OPTIONS]
SERVICES = ("frontend", "enginecore", "worker")
SHARED = {
    "log.level": "libs/triptych/observe/logging.py",
    "log.format": "libs/triptych/observe/logging.py",
    **{
        f"{section}.{name}": "libs/triptych/rpc/service_main.py"
        for section in ("frontend", "engine", "worker")
        for name in ("host", "port", "metrics_host", "metrics_port")
    },
    **{f"tls.{name}": "libs/triptych/rpc/tls.py" for name in TlsConfig.__dataclass_fields__},
}
"""Options that libs read on behalf of every service that calls them."""


def test_the_example_is_what_the_code_says():
    assert EXAMPLE.read_text() == render()


def test_the_example_holds_every_option_at_its_default():
    document = yaml.safe_load(EXAMPLE.read_text())
    assert document == dataclasses.asdict(EngineConfig())
    assert load_config(file=EXAMPLE, env={}) == EngineConfig()


@pytest.mark.parametrize("option", OPTIONS, ids=KEYS)
def test_the_example_tells_meaning_range_and_readers_above_each_key(option):
    section = EXAMPLE.read_text().split(f"\n{option.leaf}:\n")[1]
    comment = section.split(f"\n  {option.name}: ")[0].split("\n")
    above = []
    while comment and comment[-1].startswith("  # "):
        above.insert(0, comment.pop().removeprefix("  # "))
    text = " ".join(above)
    assert text.startswith(option.limits.help)
    assert option.limits.describe().lower() in text.lower()
    assert text.endswith(f"Read by {', '.join(option.limits.read_by)}.")


def test_cpu_tiny_overrides_a_few_options_and_is_small():
    file = ROOT / "config/cpu-tiny.yaml"
    tiny, usual = load_config(file=file, env={}), EngineConfig()
    usual_step = size_for_device(usual.scheduler, 0)
    assert tiny.scheduler.max_num_seqs < usual_step.max_num_seqs
    assert tiny.scheduler.max_num_batched_tokens < usual_step.max_num_batched_tokens
    assert 0 < tiny.cache.memory_fraction < 0.5, "which is usual on a CPU"
    document = yaml.safe_load(file.read_text())
    for leaf, section in document.items():
        for name, value in section.items():
            assert value != getattr(getattr(usual, leaf), name), f"{leaf}.{name} is the default anyway"


# Readers


@functools.cache
def reads_of(service: str) -> set[str]:
    """`y.z` and `x.y.z` for each attribute access `….x.y.z` in the sources of a service."""
    found = set()
    for path in (ROOT / "services" / service).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names = [name.lstrip("_") for name in ast.unparse(node).split(".")]
                found |= {".".join(names[-2:]), ".".join(names[-3:])}
    return found


HANDSHAKE = shared_config(EngineConfig()).keys()
"""Options that the engine core and the worker compare."""


def is_read(option: Option, service: str) -> bool:
    """By `config.leaf.name` or by `leaf.name`, or `config.name` where a leaf is passed as its part's config."""
    return bool(
        {option.key, f"config.{option.name}"} & reads_of(service)
        or (option.key in HANDSHAKE and service in ("enginecore", "worker"))
        or option.key in SHARED
    )


@pytest.mark.parametrize("option", OPTIONS, ids=KEYS)
def test_an_option_is_read_by_the_services_that_it_names(option):
    assert option.limits.read_by
    assert set(option.limits.read_by) <= set(SERVICES)
    for service in option.limits.read_by:
        assert is_read(option, service), f"{option.key}: services/{service} does not read it"


@pytest.mark.parametrize("option", OPTIONS, ids=KEYS)
def test_an_option_is_read_by_no_other_service(option):
    for service in set(SERVICES) - set(option.limits.read_by):
        assert f"config.{option.key}" not in reads_of(service), (
            f"{option.key}: services/{service} reads it, undeclared"
        )


def test_shared_options_are_read_by_engine_and_worker():
    for option in OPTIONS:
        if option.limits.shared:
            assert {"enginecore", "worker"} <= set(option.limits.read_by), option.key


def test_ranks_share_what_workers_read_but_options_of_a_process():
    shared_by_ranks = rank_config(EngineConfig()).keys()
    assert shared_config(EngineConfig()).keys() <= shared_by_ranks
    assert {"cache.num_blocks", "cache.memory_fraction", "parallel.tensor_parallel_size"} <= shared_by_ranks
    assert not {"worker.rank", "worker.local_rank", "worker.port", "engine.port"} & shared_by_ranks
