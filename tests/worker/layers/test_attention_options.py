"""A worker does not start with a model whose attention its backend does not compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.worker.attention.attention_packages import install
from tests.worker.context.test_threads import CHECKPOINT
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, LoadConfig, WorkerConfig
from triptych.errors import FeatureDisabled
from triptych_kernels.attend_options import AttendOptions
from triptych_services.worker.attention.create import create_attention
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.layers.attention import Attention, check_layers
from triptych_services.worker.runner.startup.create import create_runner

OPTIONS: dict[str, Any] = {
    "window": 3,
    "chunk": 8,
    "soft_cap": 50.0,
    "sinks": torch.zeros(4),
    "alibi": torch.ones(4),
    "is_causal": False,
    "latent_dim": 16,
}
SUPPORTED = {
    "native": {"window", "chunk", "soft_cap", "sinks", "alibi", "latent_dim"},
    "triton": {"window", "chunk", "soft_cap", "sinks", "alibi", "latent_dim"},
    "torch": {"window", "chunk", "soft_cap", "sinks", "alibi", "latent_dim"},
    "flash-attn": {"window", "soft_cap", "alibi"},
    "flash-attn-3": {"window", "soft_cap"},
    "flashinfer": {"window", "soft_cap"},
}


def model_with(options: AttendOptions) -> nn.Module:
    plain = AttendOptions(0.5)
    return nn.ModuleList(
        Attention(each, layer_index=index, rotary=None) for index, each in enumerate((plain, options))
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SUPPORTED)
def test_an_option_that_a_backend_lacks_is_refused(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    backend = create_attention(replace(tiny_config(), attention_backend=name))
    model = model_with(AttendOptions(0.5, **{option: OPTIONS[option]}))
    if option in SUPPORTED[name]:
        check_layers(model, backend)
        return
    with pytest.raises(FeatureDisabled, match=rf"{name}: it does not compute {option}, .* set it to auto"):
        check_layers(model, backend)


def test_all_that_a_backend_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    backend = create_attention(replace(tiny_config(), attention_backend="flashinfer"))
    check_layers(model_with(AttendOptions(0.5)), backend)
    with pytest.raises(
        FeatureDisabled, match="does not compute alibi, chunk, is_causal, latent_dim, sinks, which"
    ):
        check_layers(model_with(AttendOptions(0.5, **OPTIONS)), backend)


def test_a_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)

    def with_sinks(**options: Any) -> AttendOptions:
        return AttendOptions(**options | {"sinks": torch.zeros(CHECKPOINT["num_attention_heads"])})

    monkeypatch.setattr("triptych_services.worker.layers.self_attention.AttendOptions", with_sinks)
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINT))
    engine = EngineConfig(
        load=LoadConfig(format="random"),
        cache=CacheConfig(num_blocks=40),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    config = resolve_config(engine, read_architecture(tmp_path))
    progress: list[float] = []

    def start(backend: str) -> None:
        create_runner(
            replace(config, attention_backend=backend),
            tmp_path,
            boot_id="b",
            on_phase=lambda phase, done: progress.append(done),
        )

    with pytest.raises(FeatureDisabled, match="flash-attn: it does not compute sinks"):
        start("flash-attn")
    assert progress == [0.0]
    start("torch")
    assert len(progress) > 3
