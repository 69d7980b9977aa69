"""From a config and a model's small files to a simulated runner; and that torch has no part in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.simulated import EOS, VOCAB_SIZE, write_model
from tests.worker.tiny import new_row, step_plan
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from triptych.errors import ConfigError, ModelError
from triptych.types.identity import Likeness, compare
from triptych_services.worker.service.startup import load_runner
from triptych_services.worker.simulation.runner import create_simulated_runner
from triptych_services.worker.simulation.vocabulary import read_closing_ids, read_word_ids

WORDS = {
    "Ġred": 5,
    "Ġgreen": 6,
    "▁blue": 7,
    "grey": 8,
    "Ġ": 9,
    "Ġ12": 10,
    "Ġé": 11,
    "Ġend": EOS,
    "Ġfar": VOCAB_SIZE,
}
TOKEN_BYTES = 2 * 2 * 1 * 8 * 2  # layers, key and value, heads, head_dim, bfloat16


def create(directory: Path, **leaves):
    phases = []
    runner = create_simulated_runner(
        EngineConfig(**leaves), directory, boot_id="b", on_phase=lambda phase, _: phases.append(phase)
    )
    assert phases == ["loading"]
    return runner


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path, WORDS, added=[EOS])


def test_words_are_letters_after_a_space_and_no_control_tokens(model):
    assert read_word_ids(model, VOCAB_SIZE, ()).tolist() == [5, 6, 7]


def test_an_end_of_sequence_that_is_spelled_like_a_word_is_no_word(model):
    assert read_word_ids(model, VOCAB_SIZE, (6,)).tolist() == [5, 7]


def test_a_vocabulary_without_spaces_gives_its_letters(tmp_path):
    write_model(tmp_path, [["<s>", 0.0], ["b", -1.0], ["!", -1.0], ["ab", -2.0]])
    assert read_word_ids(tmp_path, VOCAB_SIZE, ()).tolist() == [1, 3]


def test_closing_tokens_are_quotes_brackets_and_commas(tmp_path):
    write_model(tmp_path, {'"': 3, '"},': 4, "a": 5, "{": 6, ")": EOS})
    assert read_closing_ids(tmp_path, VOCAB_SIZE, (EOS,)).tolist() == [3, 4]


@pytest.mark.parametrize("vocab", [{"!": 1, "12": 2}, {"Ġend": EOS}, {"Ġfar": VOCAB_SIZE}])
def test_a_vocabulary_without_a_word_is_refused(tmp_path, vocab):
    write_model(tmp_path, vocab, added=[EOS])
    with pytest.raises(ModelError, match=r"tokenizer\.json: none of"):
        read_word_ids(tmp_path, VOCAB_SIZE, ())


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_what_is_no_tokenizer_is_refused_by_its_path(model, text):
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: is no tokenizer"):
        read_word_ids(model, VOCAB_SIZE, ())


def test_the_facts_are_the_models_own_and_say_that_they_are_simulated(model):
    facts = create(model, model=ModelConfig(model=str(model), served_name="mine")).facts
    assert (facts.model.name, facts.model.vocab_size, facts.model.eos_token_ids) == (
        "mine",
        VOCAB_SIZE,
        (EOS,),
    )
    assert (facts.model.dtype, facts.model.max_model_len) == ("bfloat16", 64)
    assert facts.device_name == "simulated"
    assert facts.model.identity.fingerprint.startswith("simulated-")
    assert facts.weight_bytes == 0


def test_whatever_changes_the_tokens_changes_the_identity(model, tmp_path_factory):
    def identity(directory, **simulation):
        return create(directory, simulation=SimulationConfig(**simulation)).facts.model.identity

    other_words = write_model(tmp_path_factory.mktemp("other"), {"Ġred": 5, "Ġgreen": 4})
    changed = [identity(other_words), identity(model, eos_probability=0.5)]
    assert [compare(identity(model), other).likeness for other in changed] == [Likeness.NOTHING] * 2
    assert compare(identity(model, base_ms=99.0), identity(model)).likeness is Likeness.TOKENS


def test_blocks_are_as_many_as_fit_into_the_simulated_memory(model):
    facts = create(
        model,
        cache=CacheConfig(memory_fraction=0.5),
        simulation=SimulationConfig(free_memory_gib=21 * 16 * TOKEN_BYTES / 2**30),
    ).facts
    assert facts.kv.num_blocks == 10
    large = create(model, scheduler=SchedulerConfig(max_num_seqs=7)).facts
    assert large.kv.num_blocks == 7 * 64 // 16 + 1, "what all requests together can fill"


def test_every_rank_simulates_all_stages(model):
    config = {
        "cache": CacheConfig(memory_fraction=0.5),
        "simulation": SimulationConfig(free_memory_gib=21 * 16 * TOKEN_BYTES / 2**30),
        "parallel": ParallelConfig(pipeline_parallel_size=2),
    }
    first, last = (create(model, worker=WorkerConfig(rank=rank), **config).facts for rank in range(2))
    assert first.kv == last.kv
    assert first.num_stages == last.num_stages == 2
    assert first.max_steps_in_flight == 5
    assert create(model, simulation=SimulationConfig(num_stages=3)).facts.num_stages == 3


def test_the_operators_number_of_blocks_needs_no_memory(model):
    assert create(model, cache=CacheConfig(num_blocks=10**9)).facts.kv.num_blocks == 10**9


@pytest.mark.parametrize(
    ("leaves", "error", "match"),
    [
        ({"model": ModelConfig(max_model_len=65)}, ConfigError, "model.max_model_len: 65"),
        ({"simulation": SimulationConfig(profile="/nowhere.json")}, ConfigError, r"profile: /nowhere\.json"),
        ({"simulation": SimulationConfig(free_memory_gib=1e-9)}, ConfigError, "cache.memory_fraction"),
    ],
)
def test_a_config_that_cannot_be_simulated_is_refused(model, leaves, error, match):
    with pytest.raises(error, match=match):
        create(model, **leaves)


def test_eos_of_a_model_that_has_none_is_refused(tmp_path):
    write_model(tmp_path, WORDS, eos_token_id=None)
    with pytest.raises(ConfigError, match=r"simulation\.eos_probability: 0\.1"):
        create(tmp_path, simulation=SimulationConfig(eos_probability=0.1))
    create(tmp_path)


def test_torch_is_not_imported(model):
    program = (
        "import sys\n"
        "from triptych_services.worker.service.startup import load_runner\n"
        "from triptych.config import EngineConfig, ModelConfig, SimulationConfig\n"
        f"config = EngineConfig(model=ModelConfig(model={str(model)!r}), simulation=SimulationConfig(enabled=True))\n"
        "load_runner(config, lambda phase, progress: None)\n"
        "print({'torch', 'safetensors', 'gguf'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "set()"


def test_a_profile_replaces_the_coefficients(model, tmp_path):
    profile = tmp_path / "times.json"
    names = ("base_ms", "prefill_token_us", "decode_row_us", "context_token_ns")
    profile.write_text(json.dumps(dict.fromkeys(names, 0)))
    simulation = SimulationConfig(enabled=True, profile=str(profile), base_ms=1e6)
    config = EngineConfig(model=ModelConfig(model=str(model)), simulation=simulation)
    runner = load_runner(config, lambda phase, progress: None)
    assert runner.execute(step_plan(1, new=[new_row(0, [5], [1])])).token_ids.size == 1, "and not in 1000 s"
