"""Models of which each token chooses the keys that it attends to, beside what `test_families` asks of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import (
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.families import FAMILIES, INDEXER
from tests.worker.models.sequences import CUTS, Sequences
from triptych.checkpoint.architecture import ModelArchitecture
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import forced_isa, isa
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.startup.kv_groups import blocks_held

NUM_KEYS = INDEXER["index_topk"]
LENGTHS = (1, 5 * NUM_KEYS, NUM_KEYS, NUM_KEYS + 1, 18, 50)
PROMPTS, NUM_NEW = random_prompts(24, 23, 40), 6
NEAR = 1e-5
"""Two orders of sums of some hundred products in float32 differ by less, as a part of the largest."""


class Choices(TorchDispatchMode):
    """Notes, of each choice of `NUM_KEYS` among more, how far what is chosen is from what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default and args[1] == NUM_KEYS < args[0].shape[-1]:
            scores = args[0].flatten(0, -2).sort(dim=-1, descending=True).values
            scores = scores[scores[:, NUM_KEYS] > -1e30]  # the others see no more keys
            largest = scores.abs().where(scores > -1e30, 0.0).amax(dim=1)
            self.gaps += ((scores[:, NUM_KEYS - 1] - scores[:, NUM_KEYS]) / largest).tolist()
        return func(*args, **(kwargs or {}))


class Oracle:
    """A family's checkpoint and what transformers says of it, where no choice is a matter of rounding."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        oracle = save_checkpoint(FAMILIES[name].create(), directory)
        model, architecture = load_checkpoint(directory)
        choices = Choices()
        with choices, torch.no_grad():
            self.logits = [
                oracle(token_ids[None]).logits[0]
                for token_ids in Sequences(model, architecture, LENGTHS).token_ids
            ]
        with choices:
            self.tokens = [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
        assert choices.gaps
        assert min(choices.gaps) > NEAR

    def load(self, dtype: str = "float32") -> tuple[CausalLM, ModelArchitecture]:
        return load_checkpoint(self.directory, dtype=dtype)

    def check(self, logits: list[Tensor]) -> None:
        for ours, expected in zip(logits, self.logits, strict=True):
            # float32 through four layers, logits of size 10; sums in another order
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module", params=["DeepSeek V3.2", "GLM 5"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp("family"))


@pytest.mark.parametrize("cut", CUTS)
def test_logits_equal_transformers(cut: str, oracle: Oracle) -> None:
    model, architecture = oracle.load()
    assert architecture.max_context == architecture.max_position_embeddings > max(LENGTHS)
    with torch.inference_mode():
        oracle.check(Sequences(model, architecture, LENGTHS).run(CUTS[cut]))


def test_logits_equal_transformers_without_native_kernels(oracle: Oracle) -> None:
    with forced_isa(""):
        model, architecture = oracle.load()
        with torch.inference_mode():
            oracle.check(Sequences(model, architecture, LENGTHS).run(CUTS["chunks of 3"]))


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_that_is_cut_anywhere_has_the_same_bits(dtype: str, oracle: Oracle) -> None:
    """And beside other rows."""
    model, architecture = oracle.load(dtype)

    def run(first: int) -> list[Tensor]:
        """The logits of two sequences, of which `first` tokens are computed first."""
        sequences = Sequences(model, architecture, (5 * NUM_KEYS, 5 * NUM_KEYS - 3))
        sequences.kv_caches = [
            KvCache(cache.blocks.to(getattr(torch, dtype))) for cache in sequences.kv_caches
        ]
        with torch.inference_mode():
            return sequences.run(lambda row, left: first if not sequences.num_computed[row] else left)

    whole = run(4 * NUM_KEYS)
    for first in range(1, 5 * NUM_KEYS - 3):
        assert all(map(torch.equal, run(first), whole))


def test_recorded_steps_after_hits_and_preemption(oracle: Oracle) -> None:
    """Prompts in chunks of 16 tokens, decodes, the same from cached prefixes, and in a cache that does not hold all."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    runner = make_runner(oracle.directory)
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    assert engine.generate(PROMPTS, greedy) == oracle.tokens
    assert engine.generate(PROMPTS, greedy, first_number=len(PROMPTS)) == oracle.tokens
    assert engine.scheduler.counters.prefix_hits > 0
    runner = make_runner(oracle.directory)
    num_blocks = 1 + blocks_held(
        runner.facts.kv.groups, 50, 16
    )  # of 5 tokens: the first two prompts fill them
    engine = InProcessEngine(runner, max_num_batched_tokens=16, num_blocks=num_blocks, max_model_len=50)
    assert engine.generate(PROMPTS, greedy) == oracle.tokens
    assert engine.scheduler.counters.num_preemptions > 0
