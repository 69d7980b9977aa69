"""Every family of encoders against transformers on tiny random checkpoints: recorded and eager, alone and together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.worker.models.checkpoints import save_checkpoint
from tests.worker.models.encoder_families import ENCODERS, HEADS, SIZES, create_encoder
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.families.registry import own_encoders
from triptych.errors import FeatureDisabled, ModelError
from triptych_kernels.cpu.library import use_threads
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.encoder import Encoder
from triptych_services.worker.runner.encoder_runner import EagerEncoder, EncoderInputs, RecordedEncoder

LENGTHS = (1, 512, 7, 2, 128, 33)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, model of transformers) of a family, made once."""

    @cache
    def save(name: str, has_head: bool = False) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("encoder")
        return directory, save_checkpoint(create_encoder(*(HEADS if has_head else ENCODERS)[name]), directory)

    return save


def load_encoder(directory: Path) -> Encoder:
    model = load_model(tiny_config(read_architecture(directory)), open_checkpoint(directory))
    assert isinstance(model, Encoder)
    return model


def random_texts(*lengths: int) -> list[NDArray[np.int64]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, SIZES["vocab_size"], length) for length in lengths]


def new_inputs(num_tokens: int = 700) -> EncoderInputs:
    return EncoderInputs(max_num_seqs=8, max_num_batched_tokens=num_tokens)


def states_of(backend: RecordedEncoder | EagerEncoder, inputs: EncoderInputs, texts: Any) -> list[Tensor]:
    lens = inputs.gather(texts, [None] * len(texts))
    return list(backend.forward(lens).clone().split(lens))


def expected_states(oracle: Any, texts: Sequence[NDArray[np.int64]]) -> list[Tensor]:
    return [oracle(torch.from_numpy(text)[None]).last_hidden_state[0] for text in texts]


@pytest.mark.quick_cases(4)
@torch.inference_mode()
@pytest.mark.parametrize("name", ENCODERS)
def test_states_equal_transformers_recorded_and_eager(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, inputs, texts = load_encoder(directory), new_inputs(), random_texts(*LENGTHS)
    recorded = states_of(RecordedEncoder(model, inputs), inputs, texts)
    eager = states_of(EagerEncoder(model, inputs, CPU), inputs, texts)
    for own, other, expected in zip(recorded, eager, expected_states(oracle, texts), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(own, other)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "Nomic"])
def test_a_text_has_the_same_bits_alone_and_with_any_threads(name: str, saved: Any) -> None:
    inputs, texts = new_inputs(), random_texts(*LENGTHS)
    backend = RecordedEncoder(load_encoder(saved(name)[0]), inputs)
    together = states_of(backend, inputs, texts)
    for num_threads in (1, 2):
        use_threads(num_threads)
        for text, states in zip(texts, together, strict=True):
            assert torch.equal(states_of(backend, inputs, [text])[0], states)


@pytest.mark.thorough
@torch.inference_mode()
def test_a_long_text_equals_transformers(tmp_path: Path) -> None:
    name, arguments = ENCODERS["ModernBERT"]
    sizes = {
        "max_position_embeddings": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attn_implementation": "sdpa",
    }
    oracle = save_checkpoint(create_encoder(name, {**arguments, **sizes}), tmp_path)
    inputs, texts = new_inputs(8192), random_texts(8192)
    own = states_of(RecordedEncoder(load_encoder(tmp_path), inputs), inputs, texts)
    torch.testing.assert_close(own[0], expected_states(oracle, texts)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(4)
@torch.inference_mode()
@pytest.mark.parametrize("name", HEADS)
def test_scores_equal_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name, True)
    model, inputs, texts = load_encoder(directory), new_inputs(), random_texts(*LENGTHS)
    assert model.classifier is not None
    for states, text in zip(states_of(RecordedEncoder(model, inputs), inputs, texts), texts, strict=True):
        scores = model.classifier(
            states.mean(0, keepdim=True) if model.classifier.pooling == "mean" else states[:1]
        )
        expected = oracle(torch.from_numpy(text)[None]).logits
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_token_types_are_added(saved: Any) -> None:
    directory, oracle = saved("BERT")
    (text,), inputs = random_texts(11), new_inputs()
    types = np.array([0] * 5 + [1] * 6)
    lens = inputs.gather([text], [types])
    own = RecordedEncoder(load_encoder(directory), inputs).forward(lens)
    expected = oracle(torch.from_numpy(text)[None], token_type_ids=torch.from_numpy(types)[None])
    torch.testing.assert_close(own, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_stays_near(saved: Any) -> None:
    directory, oracle = saved("BERT")
    config = tiny_config(read_architecture(directory))
    config = replace(config, dtype="bfloat16", weight_dtype="bfloat16")
    model = load_model(config, open_checkpoint(directory))
    inputs, texts = new_inputs(), random_texts(*LENGTHS)
    for own, expected in zip(
        states_of(RecordedEncoder(model, inputs), inputs, texts), expected_states(oracle, texts), strict=True
    ):
        cosine = torch.nn.functional.cosine_similarity(own.float(), expected, dim=-1)
        assert float(cosine.min()) > 0.995


@torch.inference_mode()
def test_fixed_ntk_scaling_of_older_files(tmp_path: Path) -> None:
    theta, factor = 20000.0, 8.0
    oracle = save_checkpoint(create_encoder("GteModel", SIZES), tmp_path)
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    numbers = torch.arange(head_dim // 2, dtype=torch.float64)
    frequencies = theta ** (-2 * numbers / head_dim) / factor ** (2 * (numbers + 1) / head_dim)
    oracle.rotary_emb.inv_freq.copy_(frequencies)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"type": "ntk", "factor": factor}
    config |= {"architectures": ["NewModel"], "rope_theta": theta, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    inputs, texts = new_inputs(), random_texts(*LENGTHS)
    own = states_of(RecordedEncoder(load_encoder(tmp_path), inputs), inputs, texts)
    for states, expected in zip(own, expected_states(oracle, texts), strict=True):
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling | {"mixed_b": 0.6}}))
    with pytest.raises(FeatureDisabled, match="mixed_b"):
        read_architecture(tmp_path)


def test_every_architecture_is_read(saved: Any) -> None:
    bodies = {name for name, _ in ENCODERS.values()} | {name for name, _ in HEADS.values()}
    masked = {name.replace("Model", "ForMaskedLM") for name in bodies if name.endswith("Model")}
    assert bodies | masked == set(own_encoders())


def test_what_is_not_built_is_refused(saved: Any, tmp_path: Path) -> None:
    text = (saved("BERT")[0] / "config.json").read_text()
    for key, value, error in (
        ("position_embedding_type", '"relative_key"', FeatureDisabled),
        ("is_decoder", "true", FeatureDisabled),
        ("surprise", "3", ModelError),
    ):
        (tmp_path / "config.json").write_text(text.rstrip().removesuffix("}") + f', "{key}": {value}}}')
        with pytest.raises(error, match=key):
            read_architecture(tmp_path)
