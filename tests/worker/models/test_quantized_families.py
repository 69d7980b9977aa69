"""Families in 4 and 8 bits are the models of transformers, where the codes hold the checkpoint's weights exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.models.checkpoints import load_checkpoint, save_checkpoint
from tests.worker.models.encoder_families import ENCODERS, create_encoder
from tests.worker.models.families import FAMILIES, Tiny
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.models.sequences import CUTS, Sequences
from tests.worker.models.test_encoder import new_inputs, random_texts, states_of
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych_kernels.cpu.library import isa
from triptych_kernels.weights.quantized import QuantizedWeight
from triptych_services.worker.layers.weights import linear_weights
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models.encoder import Encoder
from triptych_services.worker.runner.encoder_runner import RecordedEncoder

pytestmark = [
    pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor"),
    pytest.mark.thorough,
]

WHOLE_BLOCKS = {
    "hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 32, "kv_lora_rank": 32,
}  # fmt: skip
"""Sizes with rows of whole blocks of 32, for a family that has the key."""
CODED = (
    "Apertus",
    "DeepSeek V3.2",
    "GLM 5",
    "K-EXAONE",
    "Nemotron-H, latent experts",
    "Solar Open",
)
"""xIELU, indexers that stay as they are, and mixtures with all that routers may do, and with latents."""


def with_whole_blocks(name: str) -> Tiny:
    tiny = (FAMILIES | RECURRENT_FAMILIES)[name]
    own = {key: size for key, size in WHOLE_BLOCKS.items() if key in tiny.arguments}
    sizes = {key: WHOLE_BLOCKS.get(key, size) for key, size in tiny.sizes.items()}
    return replace(tiny, arguments={**tiny.arguments, **own}, sizes=sizes)


def draw_codes(shape: torch.Size, largest: int, generator: torch.Generator) -> Tensor:
    """Return weights that are codes times a power of two; each block of 32 has the largest code, so the same scale."""
    codes = torch.randint(-largest + 1, largest, shape, generator=generator)
    codes[..., ::32] = -largest
    return codes / (64 if largest == 8 else 1024)


def save_codes(model: Any, largest: int, directory: Path) -> Any:
    """Write a model of which the matrices are codes of blocks; those at the ends have 8 bits whatever others have."""
    save_checkpoint(model, directory)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter.shape[-1] % 32 == 0:
                is_end = "embed" in name or name.startswith("lm_head")
                parameter.copy_(draw_codes(parameter.shape, 127 if is_end else largest, generator))
    model.save_pretrained(directory)
    return model


BITS = pytest.mark.parametrize(("quantization", "largest"), [("q4", 8), ("q8", 127)])


@pytest.mark.parametrize("name", CODED)
@BITS
@torch.inference_mode()
def test_weights_that_are_codes_are_those_of_transformers(
    name: str, quantization: str, largest: int, tmp_path: Path
) -> None:
    oracle = save_codes(with_whole_blocks(name).create(), largest, tmp_path)
    model, architecture = load_checkpoint(tmp_path, quantization=quantization)
    assert_quantized(model, {4, 8} if quantization == "q4" else {8})
    sequences = Sequences(model, architecture, (1, 5, 18))
    for token_ids, logits in zip(sequences.token_ids, sequences.run(CUTS["whole prompts"]), strict=True):
        assert_near(logits, oracle(token_ids[None]).logits[0])


@BITS
@torch.inference_mode()
def test_weights_of_an_encoder_that_are_codes_are_those_of_transformers(
    quantization: str, largest: int, tmp_path: Path
) -> None:
    class_name, arguments = ENCODERS["Jina v3"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    oracle = save_codes(create_encoder(class_name, {**arguments, **sizes}), largest, tmp_path)
    config = replace(tiny_config(read_architecture(tmp_path)), quantization=quantization)
    model, inputs, texts = load_model(config, open_checkpoint(tmp_path)), new_inputs(), random_texts(1, 7, 20)
    assert isinstance(model, Encoder)
    assert_quantized(model, {4} if quantization == "q4" else {8})
    for own, text in zip(states_of(RecordedEncoder(model, inputs), inputs, texts), texts, strict=True):
        assert_near(own, oracle(torch.from_numpy(text)[None]).last_hidden_state[0])


def assert_quantized(model: torch.nn.Module, bits: set[int]) -> None:
    weights = [weight for weight in linear_weights(model) if isinstance(weight, QuantizedWeight)]
    assert {weight.format.bits for weight in weights} == bits


def assert_near(own: Tensor, expected: Tensor) -> None:
    """Check numbers up to what 15 bits of the products' inputs lose, which was 1e-4 of the largest number."""
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
