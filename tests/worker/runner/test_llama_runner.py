"""The runner over the real Llama network, with random weights, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.models.checkpoints import greedy_tokens
from tests.worker.teacher_forcing import teacher_forced_logprobs
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from triptych.types.facts import Phase
from triptych_kernels.cpu.library import isa_and_build
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

CONFIG = LlamaConfig(
    vocab_size=211,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)  # so wide that every layer has its say in the token chosen
BLOCK_SIZE, BUDGET = 5, 16


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def directory(oracle: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    oracle.save_pretrained(directory)
    return directory


def make_runner(directory: Path, phases: list[tuple[str, float]] | None = None) -> SleepableRunner:
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=BUDGET),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    phases = [] if phases is None else phases
    return create_runner(
        resolve_config(engine, read_architecture(directory)),
        directory,
        boot_id="b",
        on_phase=lambda phase, progress: phases.append((phase, progress)),
    )


@pytest.fixture(scope="module")
def runner(directory: Path) -> SleepableRunner:
    return make_runner(directory)


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def test_chunked_batches_equal_transformers(runner, oracle):
    prompts, num_new = texts(1, 4, 5, 23, 41), 9
    said: list[list[int]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    tables = [range(1 + slot * 12, 13 + slot * 12) for slot in range(len(prompts))]
    new = [new_row(slot, prompt, tables[slot]) for slot, prompt in enumerate(prompts)]
    runner.reset()
    step_id = 0
    while min(map(len, said)) < num_new:
        step_id += 1
        budget, chunks, skipped, samples = BUDGET, {}, [], []
        for slot, prompt in enumerate(prompts):
            known = len(prompt) + len(said[slot])
            length = 0 if len(said[slot]) == num_new else min(known - computed[slot], budget)
            budget -= length
            computed[slot] += length
            if length == 0:
                skipped.append(slot)
            else:
                chunks[slot] = length
            if length and computed[slot] == known:
                samples.append(slot)
        result = runner.execute(step_plan(step_id, new=new, chunks=chunks, skipped=skipped))
        new = []
        for slot, token in zip(samples, result.token_ids.tolist(), strict=True):
            said[slot].append(token)
    assert said == [greedy_tokens(oracle, prompt, num_new) for prompt in prompts]


def test_teacher_forced_logprobs_are_those_of_transformers(runner, oracle):
    sequences, num_prompts = texts(9, 40, 2, 33), [3, 21, 1, 32]
    found = teacher_forced_logprobs(runner, sequences, num_prompts)
    for tokens, num_prompt, logprobs in zip(sequences, num_prompts, found, strict=True):
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        expected = expected[num_prompt - 1 : -1].gather(1, torch.tensor(tokens[num_prompt:])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)  # float32, different orders of summation


def test_creation_tells_its_phases_and_facts(directory, oracle):
    phases: list[tuple[str, float]] = []
    facts = make_runner(directory, phases).facts
    names = list(dict.fromkeys(phase for phase, _ in phases))
    assert names == [Phase.LOADING, Phase.ALLOCATING, Phase.WARMING]
    loading = [progress for phase, progress in phases if phase == Phase.LOADING]
    assert loading == sorted(loading)
    assert (loading[0], loading[-1]) == (0.0, 1.0)
    assert facts.boot_id == "b"
    assert (facts.model.name, facts.model.vocab_size, facts.model.eos_token_ids) == ("tiny", 211, (2,))
    assert (facts.model.max_model_len, facts.model.dtype, facts.model.kv_dtype) == (128, "float32", "float32")
    assert facts.kv.num_blocks == 5 * 26 + 1  # five requests of 128 tokens, and the null block
    # packed weights are padded to whole panels of 16 or 32 outputs
    plain_bytes = sum(parameter.nbytes for parameter in oracle.parameters())
    assert plain_bytes <= facts.weight_bytes < 1.2 * plain_bytes
    assert len(facts.model.identity.fingerprint) == 64
    assert json.loads(facts.model.identity.numerics)["processor"] == isa_and_build()


def test_two_workers_of_one_model_have_one_fingerprint(directory, runner):
    assert make_runner(directory).facts.model.identity.fingerprint == runner.facts.model.identity.fingerprint
