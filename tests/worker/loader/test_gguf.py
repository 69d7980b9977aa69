"""Files as llama.cpp's converter writes them are the models of transformers that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.checkpoint.gguf_families import CONVERSIONS, ENCODER_CONVERSIONS
from tests.checkpoint.gguf_files import random_blocks
from tests.checkpoint.gguf_recordings import ALL_CONVERSIONS, recordings, write_recorded
from tests.hub.conftest import cache  # noqa: F401 - a fixture
from tests.worker.models.checkpoints import load_checkpoint
from tests.worker.models.sequences import CUTS, Sequences
from tests.worker.models.test_encoder import new_inputs, random_texts, states_of
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.gguf.index import GgufFile, GgufIndex, GgufTensor
from triptych.checkpoint.mtp import find_mtp
from triptych.errors import FeatureDisabled, ModelError
from triptych.hub import resolve_model
from triptych_services.worker.loader.gguf import GgufCheckpoint
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.encoder import Encoder
from triptych_services.worker.runner.encoder_runner import RecordedEncoder

pytestmark = pytest.mark.usefixtures("cache")


def saved(name: str, directory: Path) -> Any:
    return CONVERSIONS[name].save(directory)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_logits_of_a_converted_file_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = saved(name, tmp_path / "checkpoint")
    write_recorded(name, tmp_path / "checkpoint", tmp_path / "model.gguf")
    assert_logits_equal(oracle, tmp_path / "model.gguf")


def test_projections_of_keys_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints have them in the layers that read the keys of others, and so have their files."""
    name, ones = "Gemma 4, shared keys", np.ones((20, 32), np.float32)
    oracle = saved(name, tmp_path / "checkpoint")
    unread = {
        "blk.5.attn_k.weight": ones,
        "blk.5.attn_v.weight": ones,
        "blk.5.attn_k_norm.weight": ones[:10, 0],
    }
    write_recorded(name, tmp_path / "checkpoint", tmp_path / "model.gguf", others=unread)
    assert_logits_equal(oracle, tmp_path / "model.gguf")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "keys", "refusal"),
    [
        ("Apertus", {"xielu.beta": [0.5] * 3}, r"xielu\.beta: \[.*\] must be a list of 4 numbers"),
        ("Apertus", {"xielu.eps": [0.5] * 3 + [np.nan]}, r"xielu\.eps: nan must be a number"),
        ("Apertus", {"xielu.alpha_n": None}, r"xielu\.alpha_n: is missing"),
        ("AFMoE", {"afmoe.expert_shared_count": None}, r"afmoe\.expert_shared_count: is missing"),
        (
            "Cohere 2 MoE",
            {"cohere2moe.expert_gating_func": 3},
            r"cohere2moe\.expert_gating_func: 3 must be one of 1, 2",
        ),
        (
            "Granite, windows",
            {"granite_swa.attention.rope_pattern": [True] * 3},
            r"granite_swa\.attention\.rope_pattern: \[.*\] must be true or false for each of 4 layers",
        ),
        (
            "Hunyuan 3",
            {"hy_v3.expert_shared_feed_forward_length": 63},
            r"hy_v3\.expert_shared_feed_forward_length: 63 must be a multiple of 32",
        ),
        (
            "Laguna",
            {"laguna.attention.head_count": [4, 8, 4, 8]},
            r"laguna\.attention\.head_count: \[4, 8, 4, 8\] must be one number for all layers of sliding_attention",
        ),
        (
            "DeepSeek V3.2",
            {"deepseek32.attention.indexer.key_length": 4},
            "index_head_dim: 4 must be at least qk_rope_head_dim 6",
        ),
        (
            "DeepSeek V3.2",
            {"deepseek32.expert_gating_func": 1},
            r"deepseek32\.expert_gating_func = 1: .*another function than a sigmoid",
        ),
        (
            "GLM 5",
            {"glm-dsa.attention.indexer.top_k": None},
            r"glm-dsa\.attention\.indexer\.top_k: is missing",
        ),
        (
            "GLM 5",
            {"glm-dsa.attention.indexer.types": [True] * 3},
            r"glm-dsa\.attention\.indexer\.types: .* for each of 4 layers",
        ),
        (
            "GLM 5",
            {"glm-dsa.attention.indexer.types": [False] * 4},
            "indexer_types: 'shared' must be full for layer 0",
        ),
        (
            "K-EXAONE",
            {"exaone-moe.expert_shared_feed_forward_length": 63},
            r"exaone-moe\.expert_shared_feed_forward_length = 63: .*not as wide",
        ),
        ("K-EXAONE", {"exaone-moe.expert_gating_func": 1}, r"exaone-moe\.expert_gating_func = 1"),
        (
            "K-EXAONE",
            {"exaone-moe.attention.sliding_window_pattern": [True] * 3},
            r"exaone-moe\.attention\.sliding_window_pattern: .* must be a list of 4",
        ),
        (
            "Nemotron-H, latent experts",
            {"nemotron_h_moe.moe_latent_size": None},
            r"nemotron_h_moe\.moe_latent_size: None must be the rows of",
        ),
        (
            "Nemotron-H, latent experts",
            {"nemotron_h_moe.moe_latent_size": 24},
            r"holds \[8, 16, 24\], the model needs \[8, 24, 24\]",
        ),
    ],
)
def test_a_converted_file_with_other_keys_is_refused_by_name(
    name: str, keys: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    save_file({"numbers": torch.zeros(1 << 18)}, tmp_path / "checkpoint" / "model.safetensors")
    write_recorded(name, tmp_path / "checkpoint", tmp_path / "model.gguf", keys=keys)
    with pytest.raises((ModelError, FeatureDisabled), match=refusal):
        load_checkpoint(resolve_model(str(tmp_path / "model.gguf"), progress=False))


@pytest.mark.thorough
def test_a_layer_that_guesses_is_passed_over(tmp_path: Path) -> None:
    """And `mtp` is refused, since none is built of such a file."""
    oracle, ones = saved("Qwen3-Next", tmp_path / "checkpoint"), np.ones(32, np.float32)
    further = {"attn_norm": ones, "nextn.enorm": ones, "nextn.eh_proj": np.ones((32, 64), np.float32)}
    write_recorded(
        "Qwen3-Next",
        tmp_path / "checkpoint",
        tmp_path / "model.gguf",
        others={f"blk.4.{name}.weight": array for name, array in further.items()},
        num_further=1,
    )
    assert_logits_equal(oracle, tmp_path / "model.gguf")
    assert find_mtp(read_architecture(tmp_path / "checkpoint")) is not None
    assert find_mtp(read_architecture(resolve_model(str(tmp_path / "model.gguf"), progress=False))) is None


def assert_logits_equal(oracle: Any, path: Path) -> None:
    model, architecture = load_checkpoint(resolve_model(str(path), progress=False))
    sequences = Sequences(model, architecture, (1, 5, 18, 30))
    with torch.inference_mode():
        for token_ids, logits in zip(sequences.token_ids, sequences.run(CUTS["whole prompts"]), strict=True):
            expected = oracle(token_ids[None]).logits[0]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ENCODER_CONVERSIONS)
@torch.inference_mode()
def test_states_of_a_converted_encoder_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = ENCODER_CONVERSIONS[name].save(tmp_path / "checkpoint")
    write_recorded(name, tmp_path / "checkpoint", tmp_path / "model.gguf")
    model, texts = load_encoder(tmp_path / "model.gguf"), random_texts(1, 7, 130)
    for own, text in zip(states(model, texts), texts, strict=True):
        theirs = oracle(torch.from_numpy(text)[None])
        if model.classifier is None:
            torch.testing.assert_close(own, theirs.last_hidden_state[0], rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(model.classifier(own[:1]), theirs.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "Nomic"])
@torch.inference_mode()
def test_a_quantized_encoder_is_the_one_with_the_rounded_weights(
    name: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    ENCODER_CONVERSIONS[name].save(tmp_path / "checkpoint")
    texts = random_texts(1, 7, 130)
    for path in (tmp_path / "codes.gguf", tmp_path / "floats.gguf"):
        is_dequantized = path.stem == "floats"
        write_recorded(name, tmp_path / "checkpoint", path, quantization=kind, is_dequantized=is_dequantized)
    codes, floats = (states(load_encoder(tmp_path / f"{stem}.gguf"), texts) for stem in ("codes", "floats"))
    for found, expected in zip(codes, floats, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def load_encoder(path: Path) -> Encoder:
    directory = resolve_model(str(path), progress=False)
    config = tiny_config(read_architecture(directory))
    floats = replace(config, quantization="none", dtype="float32", weight_dtype="float32")
    model = load_model(floats, open_checkpoint(directory))
    assert isinstance(model, Encoder)
    return model


def states(model: Encoder, texts: list[NDArray[np.int64]]) -> list[torch.Tensor]:
    inputs = new_inputs()
    return states_of(RecordedEncoder(model, inputs), inputs, texts)


def test_every_architecture_of_llama_cpp_is_recorded() -> None:
    assert recordings().keys() == ALL_CONVERSIONS.keys()


SPREAD = KEYS, VALUES, ELEMENTS = 2, 3, 128
"""Heads of keys, heads of values of each, and elements of a value."""


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", ["in_qkv", "in_z", "out_proj"])
def test_heads_of_values_are_put_beside_their_keys(name: str, kind: str, tmp_path: Path) -> None:
    """llama.cpp's converter of Qwen 3.5 moves them; blocks of 256 columns hold parts of two heads."""
    num_values, num_others = KEYS * VALUES * ELEMENTS, 20 if name == "in_qkv" else 0
    shape = (24, num_values) if name == "out_proj" else (num_others + num_values, 256)
    stored = np.random.default_rng(0).standard_normal(shape, np.float32)
    blocks = (
        random_blocks(GGMLQuantizationType[kind], *shape)
        if kind == "Q4_K"
        else quantize(stored, GGMLQuantizationType[kind])
    )
    checkpoint = write_one_tensor(tmp_path, f"model.layers.0.mixer.{name}.weight", kind, shape, blocks)
    numbers = dequantize(blocks, GGMLQuantizationType[kind])
    place = [
        num_others + (value * KEYS + key) * ELEMENTS + element
        for key in range(KEYS)
        for value in range(VALUES)
        for element in range(ELEMENTS)
    ]  # in the file, of each in the checkpoint
    places = [*range(num_others), *place]
    expected = torch.from_numpy(numbers[:, places] if name == "out_proj" else numbers[places])
    (tensor,) = checkpoint.tensors
    assert torch.equal(checkpoint.read(tensor, torch.float32), expected)
    for dim in (0, 1):
        part = checkpoint.read_part(tensor, torch.float32, dim, 8, 16)
        assert torch.equal(part, expected.narrow(dim, 8, 16))
    cuts_blocks = name == "out_proj" and kind == "Q4_K"
    assert (checkpoint.tensors[tensor].format is None) is (cuts_blocks or kind == "F32")


def write_one_tensor(
    directory: Path, name: str, kind: str, shape: tuple[int, ...], data: NDArray[Any]
) -> GgufCheckpoint:
    file = directory / "model.gguf"
    file.write_bytes(data.tobytes())
    tensor = GgufTensor(name, "blk.0", kind, shape, 0, data.nbytes, spread_heads=SPREAD)
    GgufIndex((GgufFile(file.name, data.nbytes, None),), (tensor,)).write(directory)
    return GgufCheckpoint(directory)
