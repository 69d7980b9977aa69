"""A layer of the checkpoint guesses what transformers' layer does, changes no token, and sleeps with the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.in_process import InProcessEngine
from tests.worker.quantized_files import SCHEMES
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
from tests.worker.runner.drafting.mtp_checkpoints import (
    MTP_FAMILIES,
    quantize_files,
    save_cycle,
    save_with_mtp,
)
from tests.worker.tiny import new_row
from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.errors import ConfigError, FeatureDisabled, ModelError
from triptych.types.facts import SleepLevel
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.drafting import heads
from triptych_services.worker.runner.request_rows import StepRows
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.runner.startup.guessing import GuessSources
from triptych_services.worker.runner.stored.start import may_store

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")


QUICK = ("MiMo", "Qwen 3.5 MoE")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in MTP_FAMILIES]
)
def test_guesses_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts take one step or two, alone and side by side, and the second time they begin in cached blocks."""
    oracle = save_with_mtp(name, tmp_path)
    runner = start(tmp_path)
    proposer = proposer_of(runner)
    assert not proposer._backend.computes_with_torch, "it is recorded"
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


@pytest.mark.parametrize("name", ["MiMo", pytest.param("Qwen3-Next", marks=pytest.mark.thorough)])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Not only the likeliest token: of the first guess, and of the ones behind it, from the layer's own states."""
    oracle = save_with_mtp(name, tmp_path)
    runner = start(tmp_path)
    found = note_logits(proposer_of(runner))
    (answer,), *_ = answers(runner, prompts=PROMPTS[1:2])
    limits = [min(MOST_GUESSES, NUM_NEW - 1 - count) for count in range(NUM_NEW)]
    texts = [[*PROMPTS[1], *answer[: count + 1]] for count in range(NUM_NEW) if limits[count] > 0]
    expected = torch.cat([oracle.logits(text, MOST_GUESSES) for text in texts])
    assert len(found) >= len(expected)
    torch.testing.assert_close(torch.cat(found)[: len(expected)], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "reads", "share"),
    [
        ("GLM 4.5", "token", 1.0),
        ("GLM 4.5", "state", 1.0),
        ("GLM 4.5", "nothing new", 0.0),
        pytest.param("Qwen 3.5", "state", 1.0, marks=pytest.mark.thorough),
    ],
)
def test_a_layer_that_must_be_right_is(name: str, reads: str, share: float, tmp_path: Path) -> None:
    """And one that says the token before it again, which a state of a wrong place would make right, is not."""
    save_cycle(tmp_path, reads, name)
    runner = start(tmp_path)
    proposer_of(runner)
    tokens, num_guesses, num_right = answers(runner)
    for prompt, answer in zip(PROMPTS, tokens, strict=True):
        text = [prompt[-1], *answer]
        assert all(after == (before - 2) % 94 + 3 for before, after in pairwise(text) if before > 2)
    assert num_guesses > 20
    assert num_right == share * num_guesses


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        pytest.param({}, GREEDY, id="float32"),
        pytest.param({"dtype": "bfloat16"}, SAMPLED, id="bfloat16"),
        pytest.param({"enforce_eager": True}, GREEDY, id="eager", marks=pytest.mark.thorough),
        pytest.param({"quantization": "q4"}, GREEDY, id="q4", marks=pytest.mark.thorough),
        pytest.param(
            {"quantization": "q4", "batch_invariant": "auto"},
            SAMPLED,
            id="q4, sampled",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_it_changes_no_token_and_sleeps_with_the_model(
    options: Mapping[str, Any], sampling: SamplingParams, tmp_path: Path
) -> None:
    save_cycle(tmp_path, "state")
    expected, *_ = answers(start(tmp_path, proposers="", **options), sampling)
    runner = start(tmp_path, **options)
    proposer_of(runner)
    found = answers(runner, sampling)
    assert found[0] == expected
    for level in (SleepLevel.WEIGHTS_ON_HOST, SleepLevel.WEIGHTS_DROPPED):
        runner.sleep(level)
        runner.wake()
        proposer = proposer_of(runner)
        assert answers(runner, sampling) == found
        assert proposer.num_waiting == 0


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["fp8 blocks", "gptq zeros"])
def test_it_is_read_as_others_have_quantized_it(scheme: str, tmp_path: Path) -> None:
    """All that was quantized and the numbers that this means, in float32, guess the same."""
    save_with_mtp("Qwen3-Next", tmp_path)
    quantize_files(tmp_path, tmp_path / "codes", tmp_path / "meant", SCHEMES[scheme])
    runners = [
        start(tmp_path / name, quantization=quantization)
        for name, quantization in (("meant", "none"), ("codes", "dequantized"))
    ]
    expected, found = (note_logits(proposer_of(runner)) for runner in runners)
    assert answers(runners[0]) == answers(runners[1])
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-5, atol=1e-5)
    plain = answers(start(tmp_path / "codes", proposers="", quantization="none"))
    runner = start(tmp_path / "codes", quantization="none")
    proposer_of(runner)
    tokens, num_guesses, _ = answers(runner)
    assert tokens == plain[0]
    assert num_guesses > 20


def test_states_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row with most of them begins anew, and guesses from there."""
    oracle = save_with_mtp("GLM 4.5", tmp_path)
    monkeypatch.setattr(heads, "_MAX_WAITING", 17)
    runner = start(tmp_path)
    checked = Checked(proposer_of(runner), oracle)
    tokens, *_ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert max(checked.firsts) > 0, "the longest prompt has 21 tokens"


def test_a_row_begins_anew_where_none_were_kept(tmp_path: Path) -> None:
    """As in each fifth step here. Its guesses are those of the states that are left."""
    oracle = save_with_mtp("GLM 4.5", tmp_path)
    expected, _, _ = answers(start(tmp_path, proposers=""))
    runner = start(tmp_path)
    checked = Checked(proposer_of(runner), oracle)
    speculation, numbers = runner.runner._speculation, count()
    assert speculation is not None
    finish = speculation.finish

    def finish_and_keep_some(*arguments: Any) -> Any:
        speculation._budget.keeps_states = next(numbers) % 5 != 4
        return finish(*arguments)

    speculation.finish = finish_and_keep_some  # type: ignore[method-assign]
    assert answers(runner)[0] == expected
    assert max(checked.firsts) > 21, "the longest prompt has 21 tokens"


def test_states_that_wait_are_no_part_of_what_guesses_take(tmp_path: Path) -> None:
    """They are kept in steps without guesses as well, and charged with each step."""
    save_with_mtp("GLM 4.5", tmp_path)
    proposer = proposer_of(start(tmp_path))
    proposer.enter(new_row(0, [5, 6, 7], range(0)))
    zero, three = np.zeros(1, np.int64), np.full(1, 3)
    step = StepRows(zero, three, zero, np.ones(1, np.bool_))
    proposer.take_states(step, None, torch.zeros(3, proposer._waiting.shape[1]))
    assert proposer.num_waiting == 3
    assert proposer.take_seconds() == 0.0


def test_a_cache_without_room_changes_nothing(tmp_path: Path) -> None:
    """Blocks for 15 tokens: rows that find none, or outgrow them, begin anew or are left to others."""
    oracle = save_with_mtp("GLM 4.5", tmp_path)
    block_bytes = 5 * 2 * 2 * 12 * 4  # tokens, pairs, heads, elements of float32
    runner = start(tmp_path, cache_gib=4.5 * block_bytes / 2**30)
    proposer = proposer_of(runner)
    checked, num_blocks = Checked(proposer, oracle), proposer.num_free_blocks
    assert num_blocks == 3
    tokens, *_ = answers(runner)
    assert tokens == [oracle.say(prompt, NUM_NEW) for prompt in PROMPTS]
    assert max(checked.firsts) > 0
    assert (proposer.num_free_blocks, proposer.num_waiting) == (num_blocks, 0)


def test_it_is_loaded_where_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_with_mtp("GLM 4.5", tmp_path)
    with caplog.at_level(logging.INFO):
        runner = start(tmp_path, proposers="ngram")
    assert "layers.3" not in caplog.text
    assert [each.name for each in runner.runner._speculation._proposers] == ["ngram"]  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO):
        runner = start(tmp_path, proposers="ngram, mtp", batch_invariant="auto")
    assert "layer model.layers.3 guesses: 0 MiB of weights (none), " in caplog.text
    assert [each.name for each in runner.runner._speculation._proposers] == ["ngram", "mtp"]  # type: ignore[union-attr]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with caplog.at_level(logging.INFO):
        start(tmp_path)
    assert "it guesses all places: of 2 such layers the first is computed" in caplog.text
    engine = EngineConfig(worker=WorkerConfig(device="cpu"))
    assert may_store(engine)
    assert not may_store(replace(engine, speculative=SpeculativeConfig(proposers="grammar, mtp")))
    assert may_store(replace(engine, speculative=SpeculativeConfig(enabled="false", proposers="mtp")))


def test_what_cannot_guess_is_refused_by_name(tmp_path: Path) -> None:
    save_with_mtp("GLM 4.5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def refuse(changed: Mapping[str, torch.Tensor | None], match: str) -> None:
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, file, {"format": "pt"})
        with pytest.raises(ModelError, match=match):
            start(tmp_path)
        start(tmp_path, proposers="ngram")  # a worker without `mtp` reads none of these tensors

    fits = r"^speculative\.proposers: mtp: the checkpoint does not fit MtpLayer: 1 tensors are"
    refuse({"model.layers.3.enorm.weight": None}, rf"{fits} missing: model\.layers\.3\.enorm\.weight")
    refuse({"model.layers.3.other.weight": torch.ones(3)}, rf"{fits} unexpected: model\.layers\.3\.other")
    refuse({"model.layers.3.eh_proj.weight": torch.ones(32, 32)}, r"mtp: .*eh_proj\.weight.*\[32, 64\]")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"speculative\.cache_gib: 1e-06 GiB hold \d+ blocks"):
        start(tmp_path, cache_gib=1e-6)

    architecture = read_architecture(tmp_path)
    without = replace(architecture, names=replace(architecture.names, ignored_prefixes=()))
    engine = EngineConfig(
        worker=WorkerConfig(device="cpu"), speculative=SpeculativeConfig(proposers="grammar,mtp")
    )
    with pytest.raises(
        FeatureDisabled, match=r"proposers = grammar,mtp: the checkpoint of Glm4MoeForCausalLM has no layer"
    ):
        create_runner(
            resolve_config(engine, without), tmp_path, boot_id="b", on_phase=lambda phase, progress: None
        )
    stages = replace(engine, parallel=ParallelConfig(pipeline_parallel_size=2))
    with pytest.raises(
        FeatureDisabled, match=r"proposers = grammar,mtp: 2 pipeline stages .*; leave mtp out"
    ):
        resolve_config(stages, architecture)


def test_rank_0_holds_all_that_guesses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks share the embedding and the head of the model, so the layer has copies of both."""
    save_with_mtp("GLM 4.5", tmp_path)

    def num_bytes(num_ranks: int, rank: int = 0) -> int:
        config = EngineConfig(
            model=ModelConfig(model="somewhere/tiny", dtype="float32"),
            worker=WorkerConfig(device="cpu", rank=rank),
            speculative=SpeculativeConfig(proposers="mtp"),
            parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        )
        sources = GuessSources(resolve_config(config, read_architecture(tmp_path)), tmp_path, None)
        with caplog.at_level(logging.INFO):
            sources.load()
        return sources.num_bytes

    alone = num_bytes(1)
    assert "rank 0" not in caplog.text
    vectors = 97 + 128  # of the embedding, and of the head, which is padded for the product
    assert num_bytes(2) == alone + vectors * 32 * 4, "elements of a state, bytes of each"
    assert (
        "layer model.layers.3: this rank also holds the whole embedding and head of the model, 0 MiB"
        in caplog.text
    )
    assert "rank 0 guesses for all 2 ranks, and holds what guesses alone" in caplog.text
    assert num_bytes(2, rank=1) == 0
