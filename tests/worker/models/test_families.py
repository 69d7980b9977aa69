"""Every family that config.json can name, against transformers on tiny random checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import (
    greedy_tokens,
    load_checkpoint,
    make_runner,
    random_prompts,
    save_checkpoint,
)
from tests.worker.models.families import FAMILIES, GPT2
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.models.sequences import CUTS, Sequences, assert_equals_oracle
from tests.worker.tiny import tiny_config
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.families.registry import head_of, own_architectures
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_kernels.cpu.program import Program, record
from triptych_services.enginecore.kv.groups import longest_step
from triptych_services.worker.attention.base import KvCache
from triptych_services.worker.loader.load import load_model, open_checkpoint
from triptych_services.worker.models import registry
from triptych_services.worker.runner import cpu_backend
from triptych_services.worker.runner.startup.kv_groups import blocks_held

NAMED_ANEW = {"ExaoneMoEForCausalLM", "MiMoForCausalLM"}
"""Architectures of which transformers has only a class of another name, or that is alike:
tests/worker/runner/drafting/test_mtp.py."""
COMPOSITE = {
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
}
ALL_FAMILIES = FAMILIES | RECURRENT_FAMILIES


GENERATING = [name for name in own_architectures() if head_of(name) == "logits"]
"""Those without this head have the body of one of these."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(directory, model of transformers) of a family by its name, made once."""

    @cache
    def save(name: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("family")
        return directory, save_checkpoint(ALL_FAMILIES[name].create(), directory)

    return save


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    tested = {tiny.create().__class__.__name__ for tiny in ALL_FAMILIES.values()}
    assert tested | COMPOSITE | NAMED_ANEW == set(GENERATING)


def test_the_readme_has_a_row_for_every_architecture() -> None:
    readme = Path(registry.__file__).with_name("README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|.*\| recorded \| (?:any|1) \| (.*) \|$", readme, re.M)
    assert sorted(name for name, _ in listed) == GENERATING
    forms = {form: tiny.create().__class__.__name__ for form, tiny in ALL_FAMILIES.items()}
    for name, tested in listed:
        if name not in COMPOSITE | NAMED_ANEW:
            own = [form for form, architecture in forms.items() if architecture == name]
            assert ", ".join(own) == tested


def cuts_of_families() -> list[Any]:
    """Return (family, cut): each family has one thorough cut, the next one of those there are, and slow others."""
    return [
        pytest.param(name, cut, marks=() if (number - place) % len(CUTS) == 0 else pytest.mark.slow)
        for number, name in enumerate(FAMILIES)
        for place, cut in enumerate(CUTS)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "cut"), cuts_of_families())
def test_logits_equal_transformers_for_all_cuts(name: str, cut: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, architecture = load_checkpoint(directory)
    sequences = Sequences(model, architecture, (1, 3, 4, 5, 11, 18))
    with torch.inference_mode():
        assert_equals_oracle(oracle, sequences, sequences.run(CUTS[cut]))


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_steps_generate_the_tokens_of_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    runner = make_runner(directory)
    assert runner.facts.kernels == (f"{isa()} recorded" if isa() else "torch")
    prompts = random_prompts(1, 4, 5, 23, 40)
    engine = InProcessEngine(runner, max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [greedy_tokens(oracle, prompt, 9) for prompt in prompts]
    assert engine.generate(prompts, greedy) == expected
    # again, from prefixes that are cached now
    assert engine.generate(prompts, greedy, first_number=len(prompts)) == expected


@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("name", ["Llama", "Qwen 3", "GPT-2"])
def test_a_layer_is_five_native_calls(name: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and qkv; rotation, cache and attention; o; norm and up; down."""
    directory, _ = saved(name)
    programs: list[Program] = []
    monkeypatch.setattr(
        cpu_backend, "record", lambda forward: programs.append(record(forward)) or programs[-1]
    )
    make_runner(directory)
    (program,) = programs
    # token embedding, the last norm, chosen rows, head, sampling; GPT-2 has an embedding of positions, too
    beside_layers = 6 if name == "GPT-2" else 5
    assert len(program) == 5 * read_architecture(directory).num_layers + beside_layers


def every_fourth(names: Iterable[str]) -> list[Any]:
    """Return the names, of which three out of four are slow: for what depends little on the family."""
    return [
        pytest.param(name, marks=pytest.mark.slow if place % 4 else ()) for place, name in enumerate(names)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", every_fourth(FAMILIES))
def test_preempted_requests_go_on_with_the_tokens_of_transformers(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    prompts = random_prompts(1, 4, 5, 11, 17)
    runner = make_runner(directory)
    # 10 blocks of 5 tokens in one full group, and 83 tokens in the end
    step = longest_step(16, runner.facts.max_steps_in_flight, runner.facts.max_samples_per_row)
    num_blocks = 1 + 2 + blocks_held(runner.facts.kv.groups, 40, step)
    engine = InProcessEngine(runner, max_num_batched_tokens=16, num_blocks=num_blocks, max_model_len=40)
    said = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert engine.scheduler.counters.num_preemptions > 0
    assert said == [greedy_tokens(oracle, prompt, 9) for prompt in prompts]


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_random_weights_have_the_names_and_shapes_of_saved_ones(name: str, saved: Any) -> None:
    directory, _ = saved(name)
    random, stored = open_checkpoint(directory, format="random"), open_checkpoint(directory)
    names = read_architecture(directory).names
    unread = names.ignored or ("\0",)
    assert {name: tensor.shape for name, tensor in random.tensors.items()} == {
        names.current(name): tensor.shape
        for name, tensor in stored.tensors.items()
        if name in random.tensors or not name.endswith(unread)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    config = replace(tiny_config(read_architecture(directory)), dtype="bfloat16", quantization="none")
    model = load_model(config, open_checkpoint(directory))
    sequences = Sequences(model, config.architecture, (40, 33, 50))
    rounded_caches = {id(cache): KvCache(cache.blocks.bfloat16()) for cache in sequences.kv_caches}
    sequences.kv_caches = [rounded_caches[id(cache)] for cache in sequences.kv_caches]
    exact, rounded = deepcopy(oracle).bfloat16().float(), deepcopy(oracle).bfloat16()
    ours, theirs = [], []
    with torch.inference_mode():
        for token_ids, logits in zip(sequences.token_ids, sequences.run(CUTS["whole prompts"]), strict=True):
            # float32 arithmetic on the weights that both have
            wanted = exact(token_ids[None]).logits[0].log_softmax(-1)
            ours.append((logits.log_softmax(-1) - wanted).abs().mean())
            their_logits = rounded(token_ids[None]).logits[0].float()
            theirs.append((their_logits.log_softmax(-1) - wanted).abs().mean())
    assert torch.stack(ours).mean() <= 1.2 * torch.stack(theirs).mean()


WHOLE_GROUPS = [
    name
    for name, tiny in FAMILIES.items()
    if tiny.sizes is not GPT2
    and not {"head_dim", "d_model", "hidden_size", "q_lora_rank"} & set(tiny.arguments)
    and 56 not in tiny.arguments.values()
]
"""Forms with sizes that the groups of quantized weights divide."""


@pytest.mark.thorough
@pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")
@pytest.mark.parametrize("name", every_fourth(WHOLE_GROUPS))
def test_8_bits_say_nearly_the_same(name: str, saved: Any) -> None:
    directory, oracle = saved(name)
    model, architecture = load_checkpoint(directory, quantization="q8")
    sequences, errors = Sequences(model, architecture, (18, 30)), []
    # which keys are chosen is all or nothing: the tokens that see no more
    num_tokens = FAMILIES[name].arguments.get("index_topk")
    with torch.inference_mode():
        for token_ids, logits in zip(sequences.token_ids, sequences.run(CUTS["whole prompts"]), strict=True):
            expected = oracle(token_ids[None]).logits[0]
            errors.append(((logits - expected).norm(dim=1) / expected.norm(dim=1))[:num_tokens])  # by token
    # the median: a token that all but ties between experts may go to another one
    assert 0 < torch.cat(errors).median() < 0.03
