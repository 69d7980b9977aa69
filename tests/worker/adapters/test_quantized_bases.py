"""Adapters beside the codes of a file, against what peft adds to the numbers that transformers has for these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoint.gguf_files import random_blocks, random_weights, use_own_cache, write_gguf
from tests.worker.adapters.trained import PROJECTIONS
from tests.worker.quantized_files import SCHEMES, save_quantized
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.hub import resolve_model
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1}
VOCAB_SIZE, NUM_LAYERS = 261, 2
PROMPT = [5, 9, 2, 7, 30, 11, 4, 8, 1, 2, 3]
TOLERANCE = 1.5e-3
"""Largest error of a log-probability. Inputs are rounded to 16 bits, which costs up to 6e-4 without adapters, too."""


def dequantized(file: Path) -> PreTrainedModel:
    """The model that transformers makes of the file, with the `gguf` package, in float32."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def with_adapter(model: PreTrainedModel, directory: Path, **settings: Any) -> Any:
    """Let peft adapt the model, and save that. Its factors and its scaling are such that bfloat16 rounds none."""
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(PROJECTIONS), **settings)
    tuned = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data = drawn.bfloat16().float()
    tuned.save_pretrained(directory)
    return tuned.eval()


def write_base(path: Path, kind: GGMLQuantizationType) -> Path:
    random = random_weights(VOCAB_SIZE, NUM_LAYERS, *SIZES.values())
    weights = {name: array * np.float32(0.2 if array.ndim == 2 else 1.0) for name, array in random.items()}
    return write_gguf(path, num_layers=NUM_LAYERS, weights=weights, quantization=kind, **SIZES)


def make_runner(base: Path, quantization: str, enforce_eager: bool) -> SleepableRunner:
    engine = EngineConfig(
        model=ModelConfig(model=str(base), quantization=quantization, dtype="float32", activation_bits="16"),
        cache=CacheConfig(block_size=4, num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu", num_threads=2, max_adapters=2, enforce_eager=enforce_eager),
    )
    config = resolve_config(engine, read_architecture(base))
    return create_runner(config, base, boot_id="b", on_phase=lambda phase, progress: None)


def logprobs_of(runner: SleepableRunner, digests: Sequence[str]) -> list[np.ndarray]:
    """Log-probabilities of the prompt's tokens, in rows of one step."""
    runner.reset()
    asked = SamplingParams(temperature=0.0, prompt_logprobs=0)
    rows = [
        new_row(slot, PROMPT, range(1 + 8 * slot, 9 + 8 * slot), sampling=asked, adapter=digest)
        for slot, digest in enumerate(digests)
    ]
    result = runner.execute(step_plan(1, new=rows, chunks=dict.fromkeys(range(len(rows)), len(PROMPT))))
    found = sorted(result.prompt_logprobs.items(), key=lambda item: item[0].slot)
    return [scored.logprobs[:, 0] for _, scored in found]


@torch.inference_mode()
def logprobs_by(model: Any) -> np.ndarray:
    scores = model(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()


@pytest.mark.thorough
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize(("kind", "quantization"), [("Q4_0", "q4"), ("Q4_1", "q4"), ("Q8_0", "q8")])
def test_quantized_bases_with_adapters_are_the_dequantized_ones_with_them(
    kind: str, quantization: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    file = write_base(tmp_path / f"{kind}.gguf", GGMLQuantizationType[kind])
    runner = make_runner(resolve_model(str(file), progress=False), quantization, enforce_eager)
    assert_adapts(runner, dequantized(file), tmp_path / "adapter")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_k_quants_with_adapters(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")

    def pack(name: str, weights: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        chosen = GGMLQuantizationType["Q6_K" if "attn_v" in name else kind]
        return random_blocks(chosen, *weights.shape), chosen

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4}
    file = write_gguf(tmp_path / "a.gguf", num_layers=NUM_LAYERS, pack=pack, **sizes)
    runner = make_runner(resolve_model(str(file), progress=False), "none", False)
    assert kind in runner.facts.model.quantization
    assert_adapts(runner, dequantized(file), tmp_path / "adapter")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", ["gptq", "gptq zeros", "gptq order", "awq", "packed", "fp8 blocks", "nvfp4", "nf4"]
)
def test_codes_of_other_tools_with_adapters(name: str, tmp_path: Path) -> None:
    base = save_quantized(tmp_path, SCHEMES[name])
    runner = make_runner(tmp_path, "none", False)
    assert_adapts(runner, base, tmp_path / "adapter")


def assert_adapts(runner: SleepableRunner, base: PreTrainedModel, adapter: Path) -> None:
    """Compare rows with and without an adapter, in one step, with the model that peft adapts.

    Args:
        base: Model of the weights that the codes mean.
        adapter: Where the adapter is written.
    """
    plain = logprobs_by(base)
    adapted = logprobs_by(with_adapter(base, adapter))
    # inputs of larger logits have larger errors
    tolerance = TOLERANCE * max(1.0, float(np.abs(plain).max()) / 4)
    assert np.abs(adapted - plain).max() > 100 * tolerance, "the adapter changes nothing"
    digest = runner.adapters.load("adapter", "", adapter).digest
    first, second, third = logprobs_of(runner, ["", digest, ""])
    np.testing.assert_allclose(second, adapted, atol=tolerance)
    for own in (first, third):
        np.testing.assert_allclose(own, plain, atol=tolerance)
