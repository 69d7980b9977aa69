"""Whole models on the device: greedy tokens against transformers, graphs on and off, a thousand mixed steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.helpers.in_process import InProcessEngine
from tests.worker.teacher_forcing import teacher_forced_logprobs
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NEAR_TIE = 1e-3  # between two logits of a spread of about 1: float32 sums in another order may swap them
COMMON: dict[str, Any] = {
    "vocab_size": 1009,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # so wide that every layer has its say in the token chosen
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, **(COMMON | more),
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mistral() -> PreTrainedModel:
    config = MistralConfig(
        hidden_size=192, intermediate_size=320, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
        sliding_window=None, **COMMON,
    )  # fmt: skip
    return MistralForCausalLM(config)


def qwen3() -> PreTrainedModel:
    config = Qwen3Config(
        hidden_size=192, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        tie_word_embeddings=True, **COMMON,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_local_experts=5, num_experts_per_tok=2, sliding_window=None, **COMMON,
    )  # fmt: skip
    return MixtralForCausalLM(config)


SHAPES = {
    "groups of 3, heads of 64, tied": lambda: llama(192, 512, 3, 1, 64, tie_word_embeddings=True),
    "groups of 4, heads of 128": lambda: llama(256, 704, 8, 2, 128, rope_parameters=LLAMA3_ROPE),
    "heads of 80, biases": lambda: llama(160, 256, 2, 2, 80, attention_bias=True, mlp_bias=True),
    "one key head of 256": lambda: llama(128, 1000, 4, 1, 256),
    "Mistral": mistral,
    "Qwen3": qwen3,
    "Mixtral": mixtral,
}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest, seed: int, device: torch.device) -> PreTrainedModel:
    return SHAPES[request.param]().to(device).eval()


def make_runner(
    model: PreTrainedModel,
    directory: Path,
    *,
    dtype: str = "float32",
    quantization: str = "none",
    eager: bool = False,
    attention: str = "auto",
    num_blocks: int = 200,
    budget: int = 96,
) -> SleepableRunner:
    model.save_pretrained(directory)
    engine = EngineConfig(
        model=ModelConfig(model="random", dtype=dtype, quantization=quantization),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        worker=WorkerConfig(device=model.device.type, enforce_eager=eager, attention_backend=attention),
    )
    resolved = resolve_config(engine, read_architecture(directory))
    return create_runner(resolved, directory, boot_id="b", on_phase=lambda phase, progress: None)


def generate(
    runner: SleepableRunner, prompts: list[list[int]], sampling: SamplingParams
) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, and how often a request lost its blocks to another."""
    engine = InProcessEngine(runner, max_num_batched_tokens=runner.facts.max_num_batched_tokens)
    return engine.generate(prompts, sampling), engine.scheduler.counters.num_preemptions


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, COMMON["vocab_size"]) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the one that transformers would choose after those before it, near ties aside."""
    sequence = torch.tensor([prompt + tokens], device=model.device)
    logits = model(sequence).logits[0, len(prompt) - 1 : -1].double()
    chosen = logits.gather(1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    lost = logits.amax(-1) - chosen
    assert lost.max() < NEAR_TIE, f"token {int(lost.argmax())} of {tokens}: {lost.tolist()}"


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, sequence: list[int], num_prompt: int) -> torch.Tensor:
    ids = torch.tensor([sequence], device=model.device)
    logprobs = model(ids).logits[0, num_prompt - 1 : -1].double().log_softmax(-1)
    return logprobs.gather(1, ids[0, num_prompt:, None])[:, 0].cpu()


def test_greedy_tokens_are_those_of_transformers(model: PreTrainedModel, seed: int, tmp_path: Path) -> None:
    """Alone and all at once, prompts in chunks, beside each other's decodes."""
    runner = make_runner(model, tmp_path)
    prompts = random_prompts(seed, 1, 15, 16, 17, 200, 33)
    together, _ = generate(runner, prompts, GREEDY)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert len(tokens) == GREEDY.max_tokens
        assert_greedy(model, prompt, tokens)
    (alone,), _ = generate(runner, prompts[4:5], GREEDY)
    assert_greedy(model, prompts[4], alone)


def test_graphs_change_no_token(model: PreTrainedModel, seed: int, tmp_path: Path) -> None:
    prompts = random_prompts(seed, 40, 3, 120)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, max_tokens=40, seed=7, ignore_eos=True)
    for sampling in (GREEDY, sampled):
        tokens = [
            generate(make_runner(model, tmp_path, eager=eager), prompts, sampling) for eager in (False, True)
        ]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("quantization", ["q4", "q8", "int8", "fp8"])
def test_graphs_change_no_token_of_quantized_experts(
    quantization: str, seed: int, device: torch.device, tmp_path: Path
) -> None:
    model = mixtral().to(device).eval()
    prompts = random_prompts(seed, 40, 3, 120)
    tokens = [
        generate(
            make_runner(model, tmp_path, dtype="bfloat16", quantization=quantization, eager=eager),
            prompts,
            GREEDY,
        )
        for eager in (False, True)
    ]
    assert tokens[0] == tokens[1]


def test_bfloat16_is_as_near_as_that_of_transformers(
    model: PreTrainedModel, seed: int, tmp_path: Path
) -> None:
    """Mean |error| of the log-probabilities of given tokens, against float32."""
    prompts = random_prompts(seed, 30, 90, 61, 5)
    sequences = [
        prompt + rest for prompt, rest in zip(prompts, random_prompts(seed + 1, 40, 40, 40, 40), strict=True)
    ]
    num_prompts = [len(prompt) for prompt in prompts]
    runner = make_runner(model, tmp_path, dtype="bfloat16")
    ours = teacher_forced_logprobs(runner, sequences, num_prompts)
    exact = [token_logprobs(model, *pair) for pair in zip(sequences, num_prompts, strict=True)]
    rounded = model.to(torch.bfloat16)
    theirs = [token_logprobs(rounded, *pair) for pair in zip(sequences, num_prompts, strict=True)]

    def mean_error(found: list[Any]) -> float:
        pairs = zip(found, exact, strict=True)
        return float(torch.cat([(torch.as_tensor(a).double() - b).abs() for a, b in pairs]).mean())

    assert mean_error(ours) < 1.2 * mean_error(theirs)


def test_a_thousand_mixed_steps_with_preemptions_leak_nothing(
    seed: int, device: torch.device, tmp_path: Path
) -> None:
    """More requests than blocks; the memory that torch holds afterwards is what it held after the first of them."""
    model = SHAPES["groups of 3, heads of 64, tied"]().to(device).eval()
    runner = make_runner(model, tmp_path, num_blocks=40, budget=64)
    steps = 0
    launch = runner.launch

    def counted(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        return launch(plan)

    runner.launch = counted  # type: ignore[method-assign]
    rng = random.Random(seed)
    held: list[int] = []
    num_preemptions = 0
    while steps < 1000:
        prompts = random_prompts(rng.randrange(1 << 30), *(rng.randrange(1, 150) for _ in range(12)))
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), top_p=rng.choice([1.0, 0.9]), max_tokens=60, ignore_eos=True,
            repetition_penalty=rng.choice([1.0, 1.2]), logprobs=rng.choice([None, 2]),
        )  # fmt: skip
        num_preemptions += generate(runner, prompts, sampling)[1]
        if device.type == "cuda":
            held.append(torch.cuda.memory_allocated(device))
    assert num_preemptions
    # graphs are recorded, and scratch grows, until every size has been seen: by the middle of it
    assert not held or max(held[len(held) // 2 :]) <= max(held[: len(held) // 2])
