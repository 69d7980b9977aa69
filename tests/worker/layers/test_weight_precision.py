"""The precision in which weights that are not quantized are held beside activations in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint.gguf_files import use_own_cache, write_gguf
from tests.worker.models.checkpoints import SIZES, save_checkpoint
from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import dense
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.hub import resolve_model
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.resolved_config import ResolvedConfig
from triptych_services.worker.layers.weights import linear_weights, weight_bytes
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

SEQUENCES = [[5, 9, 2, 7, 30, 11, 4, 8, 1, 2, 3], [3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 41, 42]]


def save(directory: Path, dtype: torch.dtype, **changes: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **changes)).to(dtype)
    return save_checkpoint(model, directory)


def config_for(directory: Path, dtype: str) -> ResolvedConfig:
    engine = EngineConfig(
        model=ModelConfig(quantization="none", dtype=dtype),
        cache=CacheConfig(block_size=4, num_blocks=200),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu"),
    )
    return resolve_config(engine, read_architecture(directory))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_take_the_bytes_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype, is_tied: bool) -> None:
    tensors = save(tmp_path, dtype, tie_word_embeddings=is_tied).state_dict()
    loaded = load_model(config_for(tmp_path, "float32"), open_checkpoint(tmp_path))
    assert all(weight.data.dtype == dtype for weight in linear_weights(loaded))
    assert torch.equal(
        dense(loaded.model.embed_tokens.weight).float(), tensors["model.embed_tokens.weight"].float()
    )
    assert torch.equal(dense(loaded.lm_head.weight), tensors["lm_head.weight"].float())
    down = loaded.model.layers[1].mlp.down_proj.weight
    assert torch.equal(dense(down), tensors["model.layers.1.mlp.down_proj.weight"].float())
    with forced_isa(""):
        plain = load_model(config_for(tmp_path, "float32"), open_checkpoint(tmp_path))
    assert weight_bytes(loaded) < (0.7 if dtype.itemsize == 2 else 1.1) * weight_bytes(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_in_16_bits_is_computed_without_a_loss(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, dtype)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    config = config_for(tmp_path, "float32")
    runner = create_runner(config, tmp_path, boot_id="test", on_phase=lambda phase, progress: None)
    for tokens, found in zip(SEQUENCES, teacher_forced_logprobs(runner, SEQUENCES, [1, 1, 1]), strict=True):
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
        expected = [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]
        assert found.tolist() == pytest.approx(expected, abs=1e-4)  # float32 sums in another order


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1"])
def test_blocks_are_dequantized_to_the_precision_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_own_cache(monkeypatch, tmp_path / "cache")
    path = write_gguf(
        tmp_path / "m.gguf", hidden_size=256, intermediate_size=256, quantization=GGMLQuantizationType[kind]
    )
    directory = resolve_model(str(path), progress=False)
    monkeypatch.setattr("triptych_services.worker.context.machine.cpu_prefers_bfloat16", lambda root: False)
    exact, rounded = (
        load_model(config_for(directory, dtype), open_checkpoint(directory)) for dtype in ("float32", "auto")
    )
    for whole, half in zip(linear_weights(exact), linear_weights(rounded), strict=True):
        assert (whole.data.dtype, half.data.dtype) == (torch.float32, torch.bfloat16)
        assert half.input_dtypes == (torch.float32,)
        assert torch.equal(dense(half), dense(whole).bfloat16().float())
        assert not torch.equal(dense(half), dense(whole))
