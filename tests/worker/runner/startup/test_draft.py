"""Workers that start with a draft model: it fits, or is refused by name, and sleeps with the model."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import SIZES, random_prompts, save_checkpoint
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.runner.drafting.guessing import guess_at_all_costs
from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.errors import ConfigError, FeatureDisabled, ModelError, TriptychError
from triptych.types.facts import SleepLevel
from triptych.types.sampling import SamplingParams
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.drafting.draft_model import DraftModelProposer
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner
from triptych_services.worker.runner.startup.draft import read_vocabulary
from triptych_services.worker.runner.stored.start import may_store

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

NUM_NEW, MOST_GUESSES = 12, 5
PROMPTS = random_prompts(3, 9, 21)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(LlamaForCausalLM(LlamaConfig(**SIZES)), directory)
    (directory / "tokenizer.json").write_text(byte_backend().to_str())
    return directory


@pytest.fixture(scope="module")
def smaller(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of one layer, with more padding of its vocabulary."""
    directory = tmp_path_factory.mktemp("draft")
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1, "vocab_size": 101})
    save_checkpoint(LlamaForCausalLM(config), directory)
    shutil.copy(checkpoint / "tokenizer.json", directory)
    return directory


def start(directory: Path, draft: Path | None, **speculative: Any) -> SleepableRunner:
    """Start a worker whose weights are held in 4 bits, as those of its draft model are."""
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", quantization="q4", batch_invariant="true"),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1),
        speculative=SpeculativeConfig(
            model="" if draft is None else "some/draft",
            enabled="false" if draft is None else "auto",
            max_tokens=MOST_GUESSES,
            **speculative,
        ),
    )
    config = resolve_config(engine, read_architecture(directory))
    return create_runner(
        config, directory, boot_id="b", on_phase=lambda phase, progress: None, draft_directory=draft
    )


def answers(runner: SleepableRunner, sampling: SamplingParams) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, and how many guesses were right."""
    if runner.runner._speculation is not None:
        guess_at_all_costs(runner.runner._speculation, MOST_GUESSES)
    engine = InProcessEngine(runner, max_num_seqs=4)  # type: ignore[arg-type]
    tokens = engine.generate(PROMPTS, replace(sampling, max_tokens=NUM_NEW, ignore_eos=True))
    runner.reset()
    return tokens, engine.scheduler.counters.num_accepted_guesses


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_changes_no_token_and_sleeps_with_the_model(
    checkpoint: Path, smaller: Path, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)
    expected, _ = answers(start(checkpoint, None), sampling)
    for draft in (checkpoint, smaller):
        runner = start(checkpoint, draft, proposers="draft")
        found, num_right = answers(runner, sampling)
        assert found == expected
        if draft == checkpoint and not temperature:
            # A row gets at most its token and five guesses in a step.
            assert num_right >= len(PROMPTS) * (NUM_NEW - 1 - 3)
        for level in (SleepLevel.WEIGHTS_ON_HOST, SleepLevel.WEIGHTS_DROPPED):
            runner.sleep(level)
            runner.wake()
            assert answers(runner, sampling) == (expected, num_right)


@pytest.mark.thorough
def test_a_draft_model_guesses_for_a_model_with_states(smaller: Path, tmp_path: Path) -> None:
    save_checkpoint(RECURRENT_FAMILIES["Falcon-H1"].create(), tmp_path)
    shutil.copy(smaller / "tokenizer.json", tmp_path)
    sampling = SamplingParams(temperature=1.0, seed=5)
    expected, _ = answers(start(tmp_path, None), sampling)
    runner = start(tmp_path, smaller, proposers="draft")
    assert runner.facts.max_samples_per_row == 1 + MOST_GUESSES
    assert runner.runner._speculation is not None
    assert [proposer.name for proposer in runner.runner._speculation._proposers] == ["draft"]
    found, num_right = answers(runner, sampling)
    assert found == expected
    for level in (SleepLevel.WEIGHTS_ON_HOST, SleepLevel.WEIGHTS_DROPPED):
        runner.sleep(level)
        runner.wake()
        assert answers(runner, sampling) == (expected, num_right)


def test_it_has_a_program_and_a_cache_of_its_own(
    checkpoint: Path, smaller: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = start(checkpoint, smaller, cache_gib=0.0001)
    assert "some/draft guesses: 0 MiB of weights (q4), 0 MiB for keys and values of " in caplog.text
    assert runner.runner._speculation is not None
    names = [proposer.name for proposer in runner.runner._speculation._proposers]
    assert names == ["grammar", "ngram", "suffix", "draft"]
    proposer = runner.runner._speculation._proposers[-1]
    assert isinstance(proposer, DraftModelProposer)
    assert not proposer._backend.computes_with_torch
    block_bytes = 16 * 2 * SIZES["num_key_value_heads"] * 8 * 4  # tokens, pairs, heads, elements of float32
    assert 0 < (proposer.num_free_blocks + 1) * block_bytes <= 0.0001 * 2**30
    engine = EngineConfig(worker=WorkerConfig(device="cpu"))
    assert may_store(engine)
    assert not may_store(replace(engine, speculative=SpeculativeConfig(model="some/draft")))


def refuse(checkpoint: Path, draft: Path, error: type[TriptychError], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        start(checkpoint, draft, **options)


def test_what_cannot_guess_for_the_model_is_refused_by_name(
    checkpoint: Path, smaller: Path, tmp_path: Path
) -> None:
    def changed(name: str) -> Path:
        return Path(shutil.copytree(smaller, tmp_path / name))

    other = changed("other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    why = r"speculative\.model = some/draft: its tokenizer is another one than that of .*: 4 entries differ, the first"
    refuse(
        checkpoint,
        other,
        FeatureDisabled,
        rf"{why} is token \d+, .*; name a model of the same family, or leave",
    )

    (other / "tokenizer.json").unlink()
    refuse(checkpoint, other, ModelError, r"other/tokenizer\.json")

    ends = changed("ends")
    for file in ("config.json", "generation_config.json"):
        config = json.loads((ends / file).read_text())
        (ends / file).write_text(json.dumps({**config, "eos_token_id": [2, 7]}))
    refuse(
        checkpoint,
        ends,
        FeatureDisabled,
        r"ends with the tokens \[2, 7\], and the model with \[2\]; name one",
    )

    states = tmp_path / "states"
    save_checkpoint(MambaForCausalLM(MambaConfig(**MAMBA)), states)
    shutil.copy(checkpoint / "tokenizer.json", states)
    refuse(
        checkpoint,
        states,
        FeatureDisabled,
        "recurrent states, which cannot go back behind a wrong guess; name",
    )

    why = r"speculative\.cache_gib: 1e-06 GiB hold 0 blocks of \d+ bytes; set it to 0\.0000\d* or more"
    refuse(checkpoint, smaller, ConfigError, why, cache_gib=1e-6)


MAMBA = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1, "eos_token_id": 2}


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]])
def test_a_vocabulary_has_all_tokens_with_their_ids(vocab: object, tmp_path: Path) -> None:
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 2, "content": "<s>", "special": True}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_vocabulary(tmp_path) == {"a": 0, "b": 1, "<s>": 2}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": [3]}}']
)
def test_a_file_without_a_vocabulary_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        read_vocabulary(tmp_path)
