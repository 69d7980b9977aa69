"""Encoders by transformers' own modules against transformers: at once and text by text, recorded and eager."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.worker.models.census import read_findings
from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.encoder_census import CLASSES, FILE, examine
from tests.worker.models.encoder_families import AT_ONCE, BY_TEXT, SIZES, create_encoder
from tests.worker.models.test_encoder import (
    CPU,
    LENGTHS,
    expected_states,
    new_inputs,
    random_texts,
    states_of,
)
from tests.worker.runner.test_encoder_runner import CLASSIFY, EMBED, entering, step
from tests.worker.tiny import tiny_config
from triptych.checkpoint.architecture import TRANSFORMERS_ENCODER, ModelArchitecture
from triptych.config import EngineConfig, WorkerConfig
from triptych.errors import FeatureDisabled
from triptych_kernels.cpu.library import isa, use_threads
from triptych_kernels.cpu.recording import NotRecordable
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.choose import choose_architecture
from triptych_services.worker.models.fallback.encoder import TransformersEncoder
from triptych_services.worker.runner.encoder_runner import EagerEncoder, RecordedEncoder
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

ALL = {**AT_ONCE, **BY_TEXT}
CLASSIFIERS = [name for name, (class_name, _) in ALL.items() if "Classification" in class_name]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, model of transformers) of an encoder, made once."""

    @cache
    def save(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("encoder")
        return directory, save_checkpoint(create_encoder(*ALL[name]), directory)

    return save


def describe(directory: Path) -> ModelArchitecture:
    architecture = choose_architecture(directory, "auto")
    assert architecture.name == TRANSFORMERS_ENCODER
    return architecture


def load(directory: Path) -> TransformersEncoder:
    model = load_model(tiny_config(describe(directory)), open_checkpoint(directory))
    assert isinstance(model, TransformersEncoder)
    return model


def make_runner(directory: Path) -> SleepableRunner:
    engine = EngineConfig(worker=WorkerConfig(device="cpu", num_threads=1))
    config = resolve_config(engine, describe(directory))
    return create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)


@torch.inference_mode()
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", AT_ONCE)
def test_states_equal_transformers_at_once(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, inputs, texts = load(directory), new_inputs(), random_texts(*LENGTHS)
    expected = expected_states(oracle.base_model, texts)
    backends = [EagerEncoder(model, inputs, CPU), *([RecordedEncoder(model, inputs)] if isa() else ())]
    for backend in backends:
        for own, theirs in zip(states_of(backend, inputs, texts), expected, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["ALBERT", "ELECTRA", "EuroBERT"])
def test_a_text_has_the_same_bits_alone_and_with_any_threads(name: str, saved: Any) -> None:
    inputs, texts = new_inputs(), random_texts(*LENGTHS)
    backend = RecordedEncoder(load(saved(name)[0]), inputs)
    together = states_of(backend, inputs, texts)
    for num_threads in (1, 2):
        use_threads(num_threads)
        for text, states in zip(texts, together, strict=True):
            assert torch.equal(states_of(backend, inputs, [text])[0], states)


@torch.inference_mode()
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", BY_TEXT)
def test_states_equal_transformers_text_by_text(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, inputs, texts = load(directory), new_inputs(), random_texts(*LENGTHS)
    with pytest.raises(NotRecordable, match="each text is a call of transformers' modules"):
        RecordedEncoder(model, inputs)
    backend = EagerEncoder(model, inputs, CPU)
    together = states_of(backend, inputs, texts)
    for text, own, theirs in zip(texts, together, expected_states(oracle.base_model, texts), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(states_of(backend, inputs, [text])[0], own)


@torch.inference_mode()
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_and_vectors_of_a_runner_equal_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    runner, texts = make_runner(directory), [text.tolist() for text in random_texts(1, 40, 7)]
    rows = [entering(slot, text, CLASSIFY) for slot, text in enumerate(texts)]
    rows.append(entering(len(rows), texts[1], EMBED))
    vectors = runner.execute(step(1, rows)).vectors
    for row, text in zip(rows, texts, strict=False):
        scores = oracle(torch.tensor([text])).logits[0]
        np.testing.assert_allclose(vectors[row.key][0], scores, rtol=1e-5, atol=1e-5)
    mean = oracle.base_model(torch.tensor([texts[1]])).last_hidden_state[0].mean(0)
    expected = torch.nn.functional.normalize(mean, dim=0)
    np.testing.assert_allclose(vectors[rows[-1].key][0], expected, rtol=1e-5, atol=1e-5)
    runner.reset()
    for number, row in enumerate(rows, 1):
        alone = runner.execute(step(number, [row])).vectors[row.key]
        assert alone.tobytes() == vectors[row.key].tobytes()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["ERNIE", "MegatronBERT"])
def test_token_types_are_added(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    (text,), inputs = random_texts(11), new_inputs()
    types = np.array([0] * 5 + [1] * 6)
    own = EagerEncoder(load(directory), inputs, CPU).forward(inputs.gather([text], [types]))
    expected = oracle.base_model(torch.from_numpy(text)[None], token_type_ids=torch.from_numpy(types)[None])
    torch.testing.assert_close(own, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("ending", ["ForMaskedLM", "ForPreTraining"])
def test_other_heads_are_left_out(ending: str, tmp_path: Path) -> None:
    oracle = save_checkpoint(create_encoder(f"Electra{ending}", SIZES), tmp_path)
    model, inputs, texts = load(tmp_path), new_inputs(), random_texts(9)
    assert model.classifier is None
    own = states_of(EagerEncoder(model, inputs, CPU), inputs, texts)
    expected = expected_states(oracle.base_model, texts)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_has_a_native_family_may_be_computed_too(tmp_path: Path) -> None:
    save_checkpoint(create_encoder("ModernBertModel", {**SIZES, "local_attention": 10}), tmp_path)
    own, native = (choose_architecture(tmp_path, backend) for backend in ("transformers", "auto"))
    assert own.name == TRANSFORMERS_ENCODER != native.name
    assert [layer.window for layer in own.layers] == [layer.window for layer in native.layers]
    texts = random_texts(*LENGTHS)
    with torch.inference_mode():
        for a, b in zip(*(_states(own, tmp_path, texts), _states(native, tmp_path, texts)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def _states(architecture: ModelArchitecture, directory: Path, texts: list[NDArray[np.int64]]) -> Any:
    model: Any = load_model(tiny_config(architecture), open_checkpoint(directory))
    inputs = new_inputs()
    return states_of(EagerEncoder(model, inputs, CPU), inputs, texts)


@pytest.mark.parametrize(
    ("class_name", "changes", "why"),
    [
        ("EuroBertForSequenceClassification", {"classifier_pooling": "late"}, "classifier does not read"),
        ("ElectraModel", {"is_decoder": True}, "ElectraModel is no encoder"),
        (
            "LongformerForSequenceClassification",
            {"attention_window": 8},
            "gives its body global_attention_mask",
        ),
        ("IBertModel", {}, "has QuantEmbedding for its embedding"),
        ("BartModel", {"d_model": 32}, "has a decoder behind its encoder"),
        ("MobileBertModel", {"quantization_config": {"quant_method": "awq"}}, "in floating point only"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    class_name: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = getattr(transformers, class_name).config_class(**SIZES).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes, "architectures": [class_name]}))
    with pytest.raises(FeatureDisabled, match=why):
        choose_architecture(tmp_path, "transformers")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["albert", "longformer", "fnet"])
def test_a_sample_of_the_census(model_type: str) -> None:
    found, known = examine(model_type), read_findings(FILE)[model_type]
    assert (found.outcome, found.reason) == (known.outcome, known.reason)


def test_the_census_has_every_class() -> None:
    findings = read_findings(FILE)
    assert {kind: finding.class_name for kind, finding in findings.items()} == CLASSES
    assert not [finding for finding in findings.values() if finding.outcome == "wrong"]
