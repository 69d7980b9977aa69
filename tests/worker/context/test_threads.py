"""Distribution of the cores during steps: only native kernels, or torch as well."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.tiny import tiny_architecture
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, WorkerConfig
from triptych_kernels.cpu import compile
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_services.worker.context.device import resolve_config, use_threads
from triptych_services.worker.models import choose
from triptych_services.worker.runner.startup import create
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.runner.stored import store
from triptych_services.worker.service import startup

NUM_THREADS = 3
CHECKPOINT = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    use_threads(1)
    torch.set_num_threads(before)


def threads_of_torch(
    directory: Path,
    *,
    dtype: str = "auto",
    cache: str = "auto",
    worker: dict[str, Any] | None = None,
    **facts: Any,
) -> tuple[int, str]:
    """How many threads torch has once a runner stands ready, and the precision that it computes in.

    Args:
        facts: what else config.json says.
    """
    (directory / "config.json").write_text(json.dumps(CHECKPOINT | facts))
    engine = EngineConfig(
        model=ModelConfig(dtype=dtype),
        load=LoadConfig(format="random"),
        cache=CacheConfig(num_blocks=40, dtype=cache),
        worker=WorkerConfig(device="cpu", num_threads=NUM_THREADS, **(worker or {})),
    )
    config = resolve_config(engine, read_architecture(directory))
    create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)
    return torch.get_num_threads(), config.dtype


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_recorded_program_has_the_cores_to_itself(tmp_path: Path, dtype: str) -> None:
    num_threads, resolved = threads_of_torch(tmp_path, torch_dtype=dtype)
    assert num_threads == 1
    assert resolved in ("float32", "bfloat16")


@pytest.mark.parametrize(
    "arguments",
    [
        {"worker": {"enforce_eager": True}},
        {"worker": {"attention_backend": "torch"}},
        {"dtype": "float16"},
        {"cache": "float16"},
        {"dtype": "bfloat16", "intermediate_size": 41},
    ],
    ids=["eager", "attention", "float16", "float16 cache", "odd sizes"],
)
def test_torch_has_its_threads_where_it_computes(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert threads_of_torch(tmp_path, **arguments)[0] == NUM_THREADS


def test_torch_has_its_threads_without_native_kernels(tmp_path: Path) -> None:
    with forced_isa(""):
        assert threads_of_torch(tmp_path)[0] == NUM_THREADS


@pytest.mark.parametrize(
    ("own", "is_built", "policy"),
    [(None, True, "PASSIVE"), ("ACTIVE", True, "ACTIVE"), (None, False, None)],
)
def test_waiting_torch_threads_do_not_spin_beside_native_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, is_built: bool, policy: str | None
) -> None:
    digest = tmp_path / "DIGEST"
    if is_built:
        digest.write_text("built")
    monkeypatch.setattr(compile, "DIGEST", digest)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    monkeypatch.setattr(startup, "resolve_model", lambda model, **_: Path())
    monkeypatch.setattr(choose, "choose_architecture", lambda directory, backend: tiny_architecture())
    monkeypatch.setattr(store, "store_later", lambda runner, config, directory: None)
    monkeypatch.setattr(create, "create_runner", lambda *_, **__: None)
    startup.load_runner(EngineConfig(worker=WorkerConfig(device="cpu")), lambda phase, progress: None)
    assert os.environ.get("OMP_WAIT_POLICY") == policy
