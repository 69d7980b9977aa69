"""Every family with recurrent states, against transformers on tiny random checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import (
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.models.sequences import CUTS, STATE_INTERVAL, Sequences, assert_equals_oracle
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.config import SpeculativeConfig
from triptych.errors import ConfigError
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program, record
from triptych_kernels.cpu.recording import Recording
from triptych_kernels.state_batch import StateBatch
from triptych_services.worker.attention.base import AttentionBatch
from triptych_services.worker.context.resolved_config import RankFacts, ResolvedConfig
from triptych_services.worker.layers.step_context import StepContext
from triptych_services.worker.models.base import CausalLM
from triptych_services.worker.runner.startup.kv_plan import plan_kv_cache

LENGTHS = (1, 3, 4, 5, 11, 2 * STATE_INTERVAL + 2)
NUM_QUICK = len(RECURRENT_FAMILIES) - 3
"""The last are another form of OLMo Hybrid, and MLPs and mixtures of Qwen3-Next and Qwen 3.5, exchanged."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, model of transformers) of a family by its name, made once."""

    @cache
    def save(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("family")
        return directory, save_checkpoint(RECURRENT_FAMILIES[name].create(), directory)

    return save


@pytest.mark.quick_cases(NUM_QUICK)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_logits_equal_transformers_for_all_cuts(name: str, cut: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(model, architecture, LENGTHS)
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(CUTS[cut]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Mamba", "Mamba 2", "LFM2", "Qwen 3.5"])
def test_prompts_beyond_transformers_chunks(name: str, saved: Any) -> None:
    """Its paths compute prompts in chunks, of 64 tokens for gated delta nets."""
    directory, oracle = saved(name)
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(model, architecture, (64, 63))
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(CUTS["chunks of 3"]))


class RecordedModel:
    """A model that computes its steps by one recorded program; it is called as a `CausalLM`."""

    max_tokens, max_rows, max_blocks = 64, 8, 8

    def __init__(self, model: CausalLM) -> None:
        self.compute_logits = model.compute_logits
        self._model = model
        self._program: Program | None = None
        self._longs = [torch.zeros(self.max_tokens, dtype=torch.int64) for _ in range(3)]
        self._rows = [torch.zeros(self.max_rows, dtype=torch.int32) for _ in range(3)]
        self._starts = torch.zeros(self.max_rows + 1, dtype=torch.int32)
        self._tables = torch.zeros(self.max_rows, self.max_blocks, dtype=torch.int32)

    def __call__(self, token_ids: Tensor, positions: Tensor, context: StepContext) -> Tensor:
        (attention,), state = context.attention, context.state
        assert state is not None
        num_tokens, num_rows = len(token_ids), len(attention.seq_lens)
        for memory, given in zip(self._longs, (token_ids, positions, attention.slot_mapping), strict=True):
            memory[:num_tokens] = given
        own = attention.seq_lens, state.read_pages, state.write_pages
        for memory, given in zip(self._rows, own, strict=True):
            memory[:num_rows] = given
        self._starts[: num_rows + 1] = attention.query_starts
        self._tables[:num_rows, : attention.block_tables.shape[1]] = attention.block_tables
        if self._program is None:
            self._program = record(lambda recording: self._forward(recording, context))
        self._program.run({"tokens": num_tokens, "rows": num_rows})
        return self._program.outputs[0][:num_tokens].clone()

    def _forward(self, recording: Recording, context: StepContext) -> tuple[Tensor]:
        token_ids, positions, slots = (recording.input(x, count="tokens") for x in self._longs)
        seq_lens, read, write = (recording.input(x, count="rows") for x in self._rows)
        starts = recording.input(self._starts, count="rows")
        tables = recording.input(self._tables, count="rows")
        batch = AttentionBatch(slots, tables, starts, seq_lens, context.attention[0].backend)
        state = StateBatch(read, write, starts)
        step = StepContext((batch,), context.kv_caches, state, state_pages=context.state_pages)
        return (self._model(token_ids, positions, step),)


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.quick_cases(NUM_QUICK)
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_recorded_steps_equal_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(RecordedModel(model), architecture, LENGTHS)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(CUTS["prompts beside decodes"]))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_steps_of_an_engine_generate_the_tokens_of_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    prompts = random_prompts(1, 4, 5, 23, 40)
    engine = InProcessEngine(make_runner(directory), max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    expected = [greedy_tokens(oracle, prompt, 13) for prompt in prompts]
    assert engine.generate(prompts, greedy) == expected
    assert engine.generate(prompts, greedy, first_number=len(prompts)) == expected
    assert (
        engine.scheduler.counters.prefix_hits == 20 + 35
    )  # the states at the ends of the prompts of 23 and 40


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_conversation_goes_on_where_its_prompt_ended(name: str, saved: Any) -> None:
    """Prompts that end at every place of a block and of a page, then the same with the answer and a new message."""
    directory, oracle = saved(name)
    engine = InProcessEngine(make_runner(directory), max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for length in (*range(14, 22), 26, 27):
        (prompt,) = random_prompts(length)
        prompt = [length % 7, *prompt]  # no prompt begins with another one
        (answer,) = engine.generate([prompt], greedy)
        assert answer == greedy_tokens(oracle, prompt, 4)
        follow_up = [*prompt, *answer, *random_prompts(3)[0]]
        before = engine.scheduler.counters.prefix_hits
        turns = [prompt, follow_up, prompt]
        assert engine.generate(turns, greedy) == [answer, greedy_tokens(oracle, follow_up, 4), answer]
        end = length // 5 * 5  # of the prompt's last full block but for its last token
        hits = engine.scheduler.counters.prefix_hits - before
        assert hits >= 3 * end, f"{length + 1} tokens: {hits} of {3 * end} need not be computed again"


@pytest.mark.parametrize("name", ["Qwen 3.5"])
def test_equal_prefixes_in_one_step_do_not_disturb_each_other(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    (prompt,) = random_prompts(37)
    prompts = [prompt, prompt, prompt[:21], prompt[:30] + prompt[:9]]
    engine = InProcessEngine(make_runner(directory), max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [greedy_tokens(oracle, each, 9) for each in prompts]
    for first_number in range(0, 3 * len(prompts), len(prompts)):
        assert engine.generate(prompts, greedy, first_number=first_number) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_preempted_requests_go_on_with_the_tokens_of_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    prompts = random_prompts(1, 4, 5, 11, 17)
    layers = read_architecture(directory).layers
    # 10 blocks of 5 tokens, and 83 tokens in the end; those with a window take some of their own
    num_blocks = 14 if any(layer.window for layer in layers) else 11
    engine = InProcessEngine(
        make_runner(directory), max_num_batched_tokens=16, num_blocks=num_blocks, max_model_len=40
    )
    said = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert said == [greedy_tokens(oracle, prompt, 9) for prompt in prompts]
    has_keys = any(layer.attention != "none" for layer in layers)
    assert not has_keys or engine.scheduler.counters.num_preemptions > 0


def test_pages_hold_whole_blocks(saved: Any) -> None:
    config = tiny_config(read_architecture(saved("LFM2")[0]), block_size=16)
    cache = replace(config.engine.cache, state_interval=40)
    with pytest.raises(
        ConfigError, match=r"cache\.state_interval: 40 is no multiple of cache\.block_size = 16"
    ):
        plan_kv_cache(replace(config, engine=replace(config.engine, cache=cache)), 1 << 30)


def without_guesses(config: ResolvedConfig) -> ResolvedConfig:
    """Return the same where nothing is kept of guesses, which takes more than tiny states."""
    return replace(config, engine=replace(config.engine, speculative=SpeculativeConfig(enabled="false")))


def test_half_of_the_memory_is_for_states(saved: Any) -> None:
    config = without_guesses(tiny_config(read_architecture(saved("LFM2")[0]), num_blocks=0))
    shape = plan_kv_cache(config, 16_000).shape
    _, states = shape.groups
    assert shape.num_state_blocks == 4_000 // states.block_bytes
    assert shape.num_blocks * shape.block_bytes + shape.num_state_blocks * states.block_bytes <= 8_000
    with pytest.raises(ConfigError, match="left for recurrent states, but 3 pages take"):
        plan_kv_cache(config, 4 * states.block_bytes)


def test_each_rank_keeps_the_states_of_its_heads(saved: Any) -> None:
    config = tiny_config(read_architecture(saved("Qwen3-Next")[0]))
    whole = plan_kv_cache(config, 1 << 30)
    half = plan_kv_cache(replace(config, rank=RankFacts(tensor_parallel_size=2)), 1 << 30)
    assert (
        sum(place.state_elements for place in whole.places)
        == 3 * config.architecture.layers[0].state.page_elements
    )
    assert [2 * place.state_elements for place in half.places] == [
        place.state_elements for place in whole.places
    ]


def test_a_stage_has_the_groups_of_the_whole_model(saved: Any) -> None:
    """Its memory limits the blocks of those kinds that it has layers of."""
    config = without_guesses(tiny_config(read_architecture(saved("Nemotron-H")[0]), num_blocks=0))
    shapes = [
        plan_kv_cache(replace(config, rank=RankFacts(stage=stage, num_stages=4)), 40_000).shape
        for stage in range(4)  # states, an MLP, keys and values, states
    ]
    assert [[group.num_layers for group in shape.groups] for shape in shapes] == [
        [0, 1],
        [0, 0],
        [1, 0],
        [0, 1],
    ]
    assert [shape.block_bytes for shape in shapes] == [0, 0, shapes[2].block_bytes, 0]
    assert shapes[0].num_blocks == shapes[1].num_blocks > shapes[2].num_blocks
    assert shapes[0].num_state_blocks == shapes[3].num_state_blocks < shapes[1].num_state_blocks
    assert shapes[1].num_state_blocks == shapes[2].num_state_blocks
    assert {(shape.num_kv_heads, shape.head_dim, shape.soft_num_blocks is None) for shape in shapes} == {
        (2, 8, False)
    }
