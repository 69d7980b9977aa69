"""The registry: known names, lazy imports, out-of-tree models."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tests.worker.tiny import tiny_architecture, tiny_config
from triptych.errors import FeatureDisabled
from triptych_services.worker.context.model_context import ModelContext
from triptych_services.worker.models import registry
from triptych_services.worker.models.decoder import DecoderForCausalLM


class OutOfTreeModel:
    def __init__(self, *, context: Any, prefix: str = "") -> None:
        self.context = context


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_name_to_model", dict(registry._name_to_model))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_built_in_architectures_are_found(name: str) -> None:
    assert registry.find_model(name) is DecoderForCausalLM


def test_an_unknown_architecture_names_the_nearest_ones() -> None:
    with pytest.raises(
        FeatureDisabled, match=r"RwkvForCausalLM: no native model .*, but for \d+, the nearest"
    ):
        registry.create_model(context=ModelContext(tiny_config(tiny_architecture(name="RwkvForCausalLM"))))


def test_a_model_can_be_registered_by_class_or_by_path() -> None:
    registry.register_model("AForCausalLM", OutOfTreeModel)
    registry.register_model("BForCausalLM", "collections:OrderedDict")
    context = ModelContext(tiny_config(tiny_architecture(name="AForCausalLM")))
    assert registry.create_model(context=context).context is context
    assert registry.find_model("BForCausalLM").__name__ == "OrderedDict"


def test_a_name_belongs_to_one_model() -> None:
    registry.register_model("AForCausalLM", OutOfTreeModel)
    registry.register_model("AForCausalLM", OutOfTreeModel)
    with pytest.raises(ValueError, match="LlamaForCausalLM: is registered already"):
        registry.register_model("LlamaForCausalLM", OutOfTreeModel)


def test_a_path_without_a_class_is_refused() -> None:
    with pytest.raises(ValueError, match="'collections' must be 'module:Class'"):
        registry.register_model("AForCausalLM", "collections")


def test_models_of_installed_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        return (
            [EntryPoint("CForCausalLM", "collections:Counter", group)] if group == "triptych.models" else []
        )

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert registry.find_model("CForCausalLM").__name__ == "Counter"
    with pytest.raises(FeatureDisabled, match=r"nearest of them .*\bCForCausalLM\b"):
        registry.find_model("DForCausalLM")


def test_the_registry_imports_no_model_until_one_is_asked_for() -> None:
    code = (
        "import sys; from triptych_services.worker.models import registry; "
        "assert 'triptych_services.worker.models.decoder' not in sys.modules; "
        "registry.find_model('LlamaForCausalLM'); assert 'triptych_services.worker.models.decoder' in sys.modules; "
        "assert 'grpc' not in sys.modules and 'google.protobuf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
