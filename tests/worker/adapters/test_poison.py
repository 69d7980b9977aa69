"""Adapters that cannot be served are refused by name, and what was loaded goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from tests.worker.adapters.trained import change_config, make_runner, save_adapter, save_base
from tests.worker.models.checkpoints import save_checkpoint
from triptych.checkpoint import adapter as adapter_files
from triptych.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE
from triptych.errors import ConfigError, FeatureDisabled, MemoryShort, ModelError
from triptych_services.worker.adapters.store import AdapterStore
from triptych_services.worker.layers.adapted import AdaptedLayer
from triptych_services.worker.runner.startup import create as startup
from triptych_services.worker.runner.startup.memory_plan import plan_memory

NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def store(base: Path) -> AdapterStore:
    return make_runner(base, max_rank=8)[1]


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(base, tmp_path / "adapter", seed=1, r=4)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, directory / WEIGHTS_FILE)

    return apply


def cut(directory: Path) -> None:
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def with_number(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NAME][2, 3] = value

    return change


def renamed(new: str, of: str = "q_proj") -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("lora_A", "lora_B"):
            name = NAME.replace("lora_A", part)
            tensors[name.replace(of, new)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("poison", "named"),
    [
        (change_config(use_dora=True), "use_dora"),
        (change_config(bias="all"), "bias"),
        (change_config(modules_to_save=["norm"]), "modules_to_save"),
        (change_config(fan_in_fan_out=True), "fan_in_fan_out"),
        (change_config(layers_to_transform=[0, 3]), "layer 3"),
        (change_config(peft_type="IA3"), "IA3"),
        (change_config(r=16), "rank 16"),
        (change_config(r=0), "rank 0"),
        (change_config(r=3), "rank 4; the config says 3"),
        (change_config(lora_alpha=float("inf")), "alpha inf"),
        (change_tensors(with_number(float("nan"))), f"{NAME}: holds numbers that are not finite"),
        (change_tensors(with_number(float("inf"))), f"{NAME}: holds numbers that are not finite"),
        (change_tensors(renamed("x_proj")), "x_proj: is no projection"),
        (change_tensors(lambda tensors: tensors.pop(NAME)), "must have lora_A and lora_B"),
        (change_tensors(lambda tensors: tensors.update({NAME: torch.zeros(4, 47)})), r"is for \[48, 47\]"),
        (change_tensors(lambda tensors: tensors.update({NAME: torch.zeros(5, 48)})), "cannot be multiplied"),
        (change_tensors(lambda tensors: tensors.update(magnitude=torch.zeros(4))), "magnitude: is no factor"),
        (cut, r"its header describes \d+ bytes of tensors; expected \d+"),
        (
            lambda directory: (directory / WEIGHTS_FILE).write_bytes(b"\xff" * 64),
            f"its header has {(1 << 64) - 1} bytes; expected 2 to 56",
        ),
        (lambda directory: (directory / WEIGHTS_FILE).unlink(), WEIGHTS_FILE),
        (lambda directory: (directory / CONFIG_FILE).write_text("[]"), "is no object"),
        (lambda directory: (directory / CONFIG_FILE).unlink(), CONFIG_FILE),
    ],
)
def test_poison_is_refused_by_name(store, adapter, poison, named):
    before = store.list()
    poison(adapter)
    with pytest.raises(ModelError, match=named):
        store.load("poison", "", adapter)
    assert store.list() == before


def test_what_does_not_fit_the_memory_is_refused(base, adapter, tmp_path):
    size = (adapter / WEIGHTS_FILE).stat().st_size
    _, store = make_runner(base, max_bytes=3 * size)
    other = save_adapter(base, tmp_path / "other", seed=2, r=4)
    kept = store.load("kept", "", adapter)
    paths = [save_adapter(base, tmp_path / str(seed), seed=seed, r=4) for seed in (3, 4, 5)]

    def load_all() -> None:
        for path in paths:
            store.load(path.name, "", path)

    with pytest.raises(MemoryShort, match="unload another one"):
        load_all()
    assert kept in store.list()
    _, small = make_runner(base, max_bytes=size - 1)
    with pytest.raises(ModelError, match=f"has {(other / WEIGHTS_FILE).stat().st_size} bytes"):
        small.load("other", "", other)


def test_the_digest_is_that_of_what_decides(store, base, adapter, tmp_path):
    first = store.load("one", "", adapter)
    change_config(inference_mode=False, base_model_name_or_path="elsewhere")(adapter)
    assert store.load("two", "", adapter).digest == first.digest
    change_config(lora_alpha=17)(adapter)
    assert store.load("three", "", adapter).digest != first.digest
    again = save_adapter(base, tmp_path / "again", seed=1, r=4)
    assert store.load("again", "", again).digest == first.digest


class Point:
    """An entry point of a package with a layout of its own."""

    name, value = "own.npz", "package:read"

    def __init__(self, read: Any) -> None:
        self.read = read

    def load(self) -> Any:
        return self.read


def factors(rank: int = 2, **changes: Any) -> dict[str, tuple[Any, Any, float]]:
    given = {
        "a": np.ones((rank, 48), np.float32),
        "b": np.ones((48, rank), np.float32),
        "scaling": 0.5,
        **changes,
    }
    return {"model.layers.0.self_attn.q_proj": (given["a"], given["b"], given["scaling"])}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "finds no factor"),
        (factors(rank=9), "has rank 9 .* within 1 to 8"),
        (factors(scaling=float("nan")), "scaling nan"),
        (factors(b=np.ones((48, 3))), "cannot be multiplied"),
        (factors(a=np.ones(48)), "cannot be multiplied"),
        (factors(a=np.ones((2, 47))), r"is for \[48, 47\]"),
        (factors(a=np.full((2, 48), np.inf)), "not finite"),
        (factors(a="text"), "package:read of triptych.adapters cannot read it"),
        (None, "package:read of triptych.adapters cannot read it"),
    ],
)
def test_what_a_package_reads_is_checked(store, tmp_path, monkeypatch, given, named):
    (tmp_path / "own.npz").write_bytes(b"x")
    points = {"triptych.adapters": [Point(lambda path: given)]}
    monkeypatch.setattr(adapter_files, "entry_points", lambda group: points.get(group, []))
    with pytest.raises(ModelError, match=named):
        store.load("poison", "", tmp_path)


def test_what_a_package_reads_is_loaded(store, tmp_path, monkeypatch):
    (tmp_path / "own.npz").write_bytes(b"x")
    digests = set()
    for given in (factors(), factors(rank=3), factors(scaling=0.25), factors(a=np.zeros((2, 48)))):
        points = [Point({tmp_path / "own.npz": given}.__getitem__)]
        monkeypatch.setattr(adapter_files, "entry_points", lambda group, points=points: points)
        facts = store.load("own", "", tmp_path)
        assert facts in store.list()
        digests.add(facts.digest)
        store.unload(facts.digest)
    assert len(digests) == 4, "what decides is in the digest"


def test_models_that_compute_no_adapters_are_refused_at_the_start(tmp_path):
    save_checkpoint(BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=40, vocab_size=99,
                                         max_position_embeddings=64)), tmp_path)  # fmt: skip
    with pytest.raises(FeatureDisabled, match=r"worker\.max_adapters: BertModel applies no adapters"):
        make_runner(tmp_path)


def test_the_slots_are_there_before_the_kv_cache_is_planned(base, monkeypatch):
    planned = []

    def plan(config, group, model, *rest):
        layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLayer)]
        planned.append(bool(layers) and all(layer.adapters is not None for layer in layers))
        return plan_memory(config, group, model, *rest)

    monkeypatch.setattr(startup, "plan_memory", plan)
    make_runner(base)
    assert planned == [True]


def test_slots_that_the_device_does_not_hold_are_refused_by_name(base, monkeypatch):
    def fail(store, model):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AdapterStore, "attach", fail)
    with pytest.raises(ConfigError, match=r"worker\.max_adapters: 4 slots of worker\.max_adapter_rank 64 do"):
        make_runner(base)


def test_a_file_of_ten_gigabytes_is_not_read(store, adapter):
    with (adapter / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(10 << 30)  # without its content
    began = time.process_time()
    with pytest.raises(ModelError, match=f"has {10 << 30} bytes"):
        store.load("large", "", adapter)
    assert time.process_time() - began < 1
