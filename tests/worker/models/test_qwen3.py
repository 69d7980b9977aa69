"""Qwen3ForCausalLM and Qwen2ForCausalLM against transformers on tiny random checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import (
    SIZES,
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.sequences import CUTS, Sequences, assert_equals_oracle
from triptych.errors import ModelError
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.loader.load import open_checkpoint

MODELS: dict[str, tuple[type, Any]] = {
    # heads wider than hidden_size / num_heads, as in Qwen3-0.6B
    "Qwen3, tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "Qwen3, untied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)),
    "Qwen3, biases": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=10, attention_bias=True)),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_for_all_cuts(name: str, cut: str, tmp_path: Path) -> None:
    create, config = MODELS[name]
    oracle = save_checkpoint(create(config), tmp_path)
    model, architecture = load_checkpoint(tmp_path)
    sequences = Sequences(model, architecture, (1, 3, 4, 5, 11, 18))
    assert_equals_oracle(oracle, sequences, sequences.run(CUTS[cut]))


@pytest.mark.parametrize("name", ["Qwen3, tied", "Qwen2"])
def test_chunked_batches_equal_transformers(name: str, tmp_path: Path) -> None:
    create, config = MODELS[name]
    oracle = save_checkpoint(create(config), tmp_path)
    runner = make_runner(tmp_path)
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    prompts = random_prompts(1, 4, 5, 23, 40)
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    said = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert said == [greedy_tokens(oracle, prompt, 9) for prompt in prompts]


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_have_the_names_and_shapes_of_saved_ones(name: str, tmp_path: Path) -> None:
    create, config = MODELS[name]
    save_checkpoint(create(config), tmp_path)
    random, saved = open_checkpoint(tmp_path, format="random"), open_checkpoint(tmp_path)
    assert {name: stored.shape for name, stored in random.tensors.items()} == {
        name: stored.shape for name, stored in saved.tensors.items()
    }


def test_a_qwen3_checkpoint_without_its_norms_is_refused(tmp_path: Path) -> None:
    # the tensors of Qwen2 without biases, under Qwen3's name
    oracle = save_checkpoint(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)), tmp_path)
    kept = {name: tensor for name, tensor in oracle.state_dict().items() if "q_norm" not in name}
    oracle.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(
        ModelError, match=r"2 tensors are missing: model\.layers\.0\.self_attn\.q_norm\.weight"
    ):
        load_checkpoint(tmp_path)
