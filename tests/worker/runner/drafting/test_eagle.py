"""An EAGLE-3 head guesses what speculators and transformers do, changes no token, and sleeps with its model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.in_process import InProcessEngine
from tests.worker.runner.drafting.eagle_checkpoints import (
    DRAFT_VOCAB,
    STATE,
    VOCAB,
    save_as_authors,
    save_as_speculators,
    save_cycle,
    save_model,
    write_head,
)
from tests.worker.runner.drafting.heads import (
    GREEDY,
    MAX_SEQS,
    MOST_GUESSES,
    NUM_NEW,
    PROMPTS,
    SAMPLED,
    Checked,
    answers,
    note_logits,
    proposer_of,
    start,
)
from tests.worker.runner.drafting.mtp_checkpoints import save_with_mtp
from tests.worker.runner.drafting.speculators_recording import recorded_heads, save_target
from triptych.checkpoint.config_json import read_architecture
from triptych.checkpoint.eagle import is_eagle3, read_eagle3
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.errors import ConfigError, FeatureDisabled, ModelError, TriptychError
from triptych.types.facts import SleepLevel
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.models.eagle import Eagle3Head
from triptych_services.worker.runner.drafting import heads
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.service.startup import load_runner

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

SAVE = {"authors": save_as_authors, "speculators": save_as_speculators}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", SAVE)
def test_guesses_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    """Prompts take one step or two, alone and side by side, and the second time they begin in cached blocks."""
    oracle = SAVE[layout](tmp_path / "head", save_model(tmp_path))
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head")
    proposer = proposer_of(runner)
    assert not proposer._backend.computes_with_torch, "it is recorded"
    assert not runner.runner.computes_with_torch, "and so is the model"
    assert proposer.name == "eagle3"
    checked = Checked(proposer, oracle)
    engine = InProcessEngine(runner, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]
    sampling = replace(GREEDY, max_tokens=NUM_NEW, ignore_eos=True)
    expected = [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, sampling) == expected
    assert set(checked.firsts) == {0}
    checked.firsts.clear()
    assert engine.generate(PROMPTS, sampling) == expected
    assert {first > 0 for first in checked.firsts} == {True, False}, "some prompts are shorter than a block"
    assert len(checked.firsts) > NUM_NEW


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.thorough)])
def test_logits_are_those_that_speculators_computed(kind: str, tmp_path: Path) -> None:
    """The first guess goes on from the model's states, the one behind it from the head's own."""
    recorded = recorded_heads()[kind]
    recorded.save(tmp_path / "head")
    save_target(tmp_path)
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head")
    found = note_logits(proposer_of(runner))
    (answer,), *_ = answers(runner, prompts=[recorded.text[:-1]])
    assert answer[0] == recorded.text[-1]
    torch.testing.assert_close(torch.cat(found)[:2], torch.tensor(recorded.logits), rtol=2e-4, atol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "options"), [("authors", {}), ("speculators", {"enforce_eager": True})])
def test_logits_are_those_of_transformers(layout: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    oracle = SAVE[layout](tmp_path / "head", save_model(tmp_path))
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head", **options)
    found = note_logits(proposer_of(runner))
    (answer,), *_ = answers(runner, prompts=PROMPTS[1:2])
    text = [*PROMPTS[1], answer[0]]
    expected = oracle.logits(text, MOST_GUESSES)
    torch.testing.assert_close(torch.cat(found)[: len(expected)], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("is_right", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_head_that_must_be_right_is(is_right: bool, tmp_path: Path) -> None:
    """And one that says the token before it again, which a state of a wrong place would make right, is not."""
    save_cycle(tmp_path, tmp_path / "head", is_right=is_right)
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head")
    proposer_of(runner)
    tokens, num_guesses, num_right = answers(runner)
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        text = [prompt[-1], *answer]
        assert all(after == (before - 2) % 94 + 3 for before, after in pairwise(text) if before > 2)
    assert num_guesses > 20
    assert num_right == is_right * num_guesses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        pytest.param({}, GREEDY, id="float32"),
        pytest.param({"dtype": "bfloat16"}, SAMPLED, id="bfloat16"),
        pytest.param({"quantization": "q4", "batch_invariant": "auto"}, SAMPLED, id="q4"),
    ],
)
def test_it_changes_no_token_and_sleeps_with_the_model(
    options: Mapping[str, Any], sampling: SamplingParams, tmp_path: Path
) -> None:
    save_cycle(tmp_path, tmp_path / "head", is_right=True)
    expected, *_ = answers(start(tmp_path, proposers="", **options), sampling)
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head", **options)
    proposer_of(runner)
    found = answers(runner, sampling)
    assert found[0] == expected
    assert found[1] > 20
    assert found[2] == found[1] or sampling is SAMPLED
    for level in (SleepLevel.WEIGHTS_ON_HOST, SleepLevel.WEIGHTS_DROPPED):
        runner.sleep(level)
        runner.wake()
        proposer = proposer_of(runner)
        assert answers(runner, sampling) == found
        assert proposer.num_waiting == 0


@pytest.mark.thorough
def test_states_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row with most of them begins anew, and guesses from there."""
    oracle = save_as_authors(tmp_path / "head", save_model(tmp_path))
    monkeypatch.setattr(heads, "_MAX_WAITING", 17)
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head")
    checked = Checked(proposer_of(runner), oracle)
    tokens, *_ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert max(checked.firsts) > 0, "the longest prompt has 21 tokens"


@pytest.mark.thorough
def test_a_cache_without_room_changes_nothing(tmp_path: Path) -> None:
    """Blocks for 32 tokens: rows that find none, or outgrow them, begin anew or are left to others."""
    oracle = save_as_authors(tmp_path / "head", save_model(tmp_path))
    block_bytes = 16 * 2 * 2 * 8 * 4  # tokens, pairs, heads, elements of float32
    runner = start(tmp_path, proposers="draft", head=tmp_path / "head", cache_gib=3.5 * block_bytes / 2**30)
    proposer = proposer_of(runner)
    checked, num_blocks = Checked(proposer, oracle), proposer.num_free_blocks
    assert num_blocks == 2
    tokens, *_ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert max(checked.firsts) > 0
    assert (proposer.num_free_blocks, proposer.num_waiting) == (num_blocks, 0)


def test_what_a_checkpoint_is_follows_from_its_config(tmp_path: Path) -> None:
    """The first heads that were published call themselves Llamas."""
    model = save_model(tmp_path)
    assert not is_eagle3(tmp_path)
    for name, save in SAVE.items():
        save(tmp_path / name, model)
        assert is_eagle3(tmp_path / name)
    config = json.loads((tmp_path / "authors/config.json").read_text())
    for changes, layers in (
        ({"architectures": ["LlamaForCausalLM"]}, ()),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, 3)),
        # ModelOpt and SpecForge count from the state behind layer 0
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, ()),
    ):
        (tmp_path / "authors/config.json").write_text(json.dumps(config | changes))
        assert is_eagle3(tmp_path / "authors")
        spec = read_eagle3(tmp_path / "authors")
        assert spec.layers == layers
        assert spec.layers_of(32) == (layers or (2, 16, 29))


@pytest.mark.thorough
def test_a_head_without_an_embedding_of_its_own_shares_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And so does one with a copy of it."""
    save_as_authors(tmp_path / "head", save_model(tmp_path))
    config = json.loads((tmp_path / "head/config.json").read_text())
    tensors = load_file(tmp_path / "head/model.safetensors")
    copied = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for embedding, has_own in ((None, False), (copied, False), (copied + 1, True)):
        more = {} if embedding is None else {"embed_tokens.weight": embedding}
        write_head(tmp_path / "head", config, tensors | more)
        with caplog.at_level(logging.INFO):
            runner = start(tmp_path, proposers="ngram", head=tmp_path / "head")
        assert runner.runner._speculation is not None
        proposer = runner.runner._speculation._proposers[-1]
        assert isinstance(proposer, heads.Eagle3Proposer)
        head = proposer._combine.__self__  # type: ignore[attr-defined]
        assert isinstance(head, Eagle3Head)
        assert (head.embed_tokens is not None) == has_own
    assert "some/head guesses: 0 MiB of weights (none), " in caplog.text


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    save_as_authors(tmp_path / "head", save_model(tmp_path))
    config = json.loads((tmp_path / "head/config.json").read_text())
    tensors = load_file(tmp_path / "head/model.safetensors")

    def refuse(
        changed: Mapping[str, Any], match: str, error: type[TriptychError] = FeatureDisabled, **others: Any
    ) -> None:
        """Change keys of config.json, and tensors, of which None is left out."""
        kept = {name: each for name, each in {**tensors, **others}.items() if each is not None}
        write_head(tmp_path / "head", config | changed, kept)
        with pytest.raises(error, match=match):
            start(tmp_path, proposers="draft", head=tmp_path / "head")

    option = r"speculative\.model = some/head: "
    refuse({"target_hidden_size": 40}, rf"{option}it was trained for states of 40 elements, .* has {STATE}")
    refuse(
        {"vocab_size": 99}, rf"{option}it was trained for a vocabulary of 99 tokens, and .* has {VOCAB}; name"
    )
    refuse(
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]},
        rf"{option}it reads the states behind 1, 2, 5 layers, .* 4",
    )
    refuse(
        {"hidden_size": 40, "target_hidden_size": 32}, rf"{option}it has no embed_tokens\.weight, .* 40 ele"
    )
    refuse({"norm_before_fc": True}, "norm_before_fc = True: .*states have norms before they are joined")
    refuse({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config\.use_aux_hidden_state = False")
    refuse({"speculators_model_type": "dflash"}, "speculators_model_type = 'dflash'")
    refuse({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: the weights of a head")

    odd = ModelError
    refuse({"draft_vocab_size": 98}, "draft_vocab_size: 98 must be at most vocab_size 97", odd)
    refuse({"num_hidden_layers": 2}, "num_hidden_layers: 2 must be 1", odd)
    refuse({"model_type": "mistral"}, "model_type: 'mistral' is none of llama, qwen3", odd)
    refuse({"eagle_aux_hidden_state_layer_ids": []}, r"layer_ids: \[\] must be a list of numbers", odd)
    refuse({"parallel_drafting": 4}, "parallel_drafting: 4 is a key that this family does not have here", odd)
    refuse({"eagle_config": {"depth": 4}}, r"eagle_config\.depth: 4 is a key", odd)

    fits = r"^speculative\.model: the checkpoint does not fit Eagle3Head: 1 tensors are"
    refuse({}, rf"{fits} missing: fc\.weight", odd, **{"fc.weight": None})
    refuse({}, rf"{fits} unexpected: mask_hidden", odd, mask_hidden=torch.ones(3))
    refuse({}, r"lm_head\.weight.*\[37, 32\]", odd, **{"lm_head.weight": torch.ones(36, 32)})
    offsets = tensors["d2t"].clone()
    offsets[3] = VOCAB - 3
    refuse(
        {}, rf"d2t: token 3 of the head is 97 of the model, which has {VOCAB} tokens; 1 are", odd, d2t=offsets
    )
    refuse(
        {},
        rf"d2t: is torch\.int64 of shape \[3\], must be int64 of shape \[{DRAFT_VOCAB}\]",
        odd,
        d2t=offsets[:3],
    )
    refuse({}, rf"d2t: is missing, and the head has {DRAFT_VOCAB} of {VOCAB} tokens", odd, d2t=None)

    write_head(tmp_path / "head", config, tensors)
    with pytest.raises(ConfigError, match=r"speculative\.cache_gib: 1e-06 GiB hold \d+ blocks"):
        start(tmp_path, proposers="draft", head=tmp_path / "head", cache_gib=1e-6)
    engine = EngineConfig(
        worker=WorkerConfig(device="cpu"),
        speculative=SpeculativeConfig(model="some/head"),
        parallel=ParallelConfig(pipeline_parallel_size=2),
    )
    with pytest.raises(FeatureDisabled, match=rf"{option}2 pipeline stages do not .*; leave it empty"):
        resolve_config(engine, read_architecture(tmp_path))


@pytest.mark.thorough
def test_it_guesses_beside_a_layer_of_the_checkpoint(tmp_path: Path) -> None:
    """One reads the last state, the other one states between layers."""
    oracle = save_with_mtp("GLM 4.5", tmp_path)
    save_as_authors(tmp_path / "head", oracle.model)
    runner = start(tmp_path, proposers="mtp, draft", head=tmp_path / "head")
    assert runner.runner._speculation is not None
    assert [each.name for each in runner.runner._speculation._proposers] == ["mtp", "eagle3"]
    assert runner.runner._speculation.state_layers == (2, 1, 0)
    tokens, *_ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.mark.thorough
def test_a_worker_finds_it_by_its_directory(tmp_path: Path) -> None:
    """Published heads have no tokenizer."""
    oracle = save_as_authors(tmp_path / "head", save_model(tmp_path))
    (tmp_path / "tokenizer.json").write_text(byte_backend().to_str())
    engine = EngineConfig(
        model=ModelConfig(model=str(tmp_path), dtype="float32"),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1),
        speculative=SpeculativeConfig(
            proposers="draft", model=str(tmp_path / "head"), max_tokens=MOST_GUESSES
        ),
    )
    runner = load_runner(engine, lambda phase, progress: None)
    assert isinstance(runner, SleepableRunner)
    assert proposer_of(runner).name == "eagle3"
    tokens, num_guesses, _ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert num_guesses > 20
