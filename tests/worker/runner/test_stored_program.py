"""A start from a stored program: the same tokens without torch, everything else with it, and files that are refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.models.checkpoints import SIZES, greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.pooled import pool, save_decoder
from tests.worker.runner.drafting.guessing import Replaying, changes, guess_at_all_costs
from tests.worker.runner.stored_start import config_of, decode, enter, start
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import EngineConfig
from triptych.errors import ModelError
from triptych.types.facts import SleepLevel
from triptych.types.pooling import PoolingParams
from triptych.types.sampling import SAMPLING_FIELDS, SamplingParams
from triptych.types.step import RowKey, StepPlan
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.context.machine import machine_directory
from triptych_services.worker.runner.drafting import create as drafting
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup import create
from triptych_services.worker.runner.startup.create import create_runner, load_to_resume
from triptych_services.worker.runner.stored import image
from triptych_services.worker.runner.stored.image import make_room
from triptych_services.worker.runner.stored.runner import Resume, StoredRunner, is_plain
from triptych_services.worker.runner.stored.start import programs_directory
from triptych_services.worker.runner.stored.store import store, store_later

pytestmark = pytest.mark.skipif(not isa(), reason="programs are recorded for the native kernels")

NUM_NEW = 8
PROMPTS = random_prompts(5, 3, 9)
FLAGS: dict[str, Any] = {
    "model.model": "somewhere/tiny",
    "model.dtype": "float32",
    "model.quantization": "none",
    "cache.block_size": 8,
    "cache.num_blocks": 33,
    "scheduler.max_num_seqs": 5,
    "scheduler.max_num_batched_tokens": 32,
    "worker.device": "cpu",
    "worker.num_threads": 1,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint and transformers' model of it."""
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_checkpoint(LlamaForCausalLM(LlamaConfig(**SIZES)), directory)


@pytest.fixture
def directory(tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the checkpoint; programs are stored in a directory of the test's own."""
    own, known = tmp_path / "machine", machine_directory()
    own.mkdir()
    for file in known.glob("*.json"):  # else each test measures the machine
        shutil.copy(file, own)
    monkeypatch.setenv("TRIPTYCH_MACHINE_DIR", str(own))
    return tiny[0]


def ordinary(config: EngineConfig, directory: Path) -> SleepableRunner:
    resolved = resolve_config(config, read_architecture(directory))
    return create_runner(resolved, directory, boot_id="b", on_phase=lambda phase, progress: None)


def leave_program(config: EngineConfig, directory: Path) -> Path:
    """Store the program of an ordinary start, and return its file."""
    resolved = resolve_config(config, read_architecture(directory))
    path = store(ordinary(config, directory), resolved, directory)
    assert path is not None
    return path


def in_process_without_torch(flags: dict[str, Any], directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.worker.runner.stored_start"]
    arguments = [json.dumps(flags), str(directory), str(NUM_NEW), json.dumps(PROMPTS)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_float32_without_torch_gives_the_tokens_of_transformers(
    tiny: tuple[Path, Any], directory: Path
) -> None:
    leave_program(config_of(FLAGS), directory)
    found = in_process_without_torch(FLAGS, directory)
    assert found["tokens"] == [greedy_tokens(tiny[1], prompt, NUM_NEW) for prompt in PROMPTS]
    assert not found["has_torch"]


@pytest.mark.thorough
@pytest.mark.usefixtures("directory")  # of the test's own programs
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("GLM 4.5", "none"),
        ("Qwen 2 MoE", "q8"),
        ("DeepSeek V3", "none"),
        ("GLM 5", "none"),  # keys are chosen, in one layer by another
        ("MiniCPM 3", "q8"),
        ("Gemma 3", "none"),  # four KV groups
        ("Mistral", "q8"),  # one group of windows
        ("Falcon-H1", "none"),  # states beside keys and values
        ("Qwen3-Next", "none"),
        ("Mamba", "none"),  # states only
    ],
)
def test_mixtures_latents_windows_and_states_without_torch_give_the_tokens_of_a_fresh_recording(
    family: str, quantization: str, tmp_path: Path
) -> None:
    directory = tmp_path / "mixture"
    oracle = save_checkpoint((FAMILIES | RECURRENT_FAMILIES)[family].create(), directory)
    flags = FLAGS | {"model.quantization": quantization, "cache.num_blocks": 65, "cache.state_interval": 16}
    expected = [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    if quantization != "none":
        expected = decode(ordinary(config_of(flags), directory), PROMPTS, NUM_NEW)
    leave_program(config_of(flags), directory)
    found = in_process_without_torch(flags, directory)
    assert found == {"tokens": expected, "has_torch": False}


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_q4_without_torch_gives_the_tokens_of_a_fresh_recording(directory: Path, cache_dtype: str) -> None:
    flags = FLAGS | {"model.quantization": "q4", "cache.dtype": cache_dtype}
    expected = decode(ordinary(config_of(flags), directory), PROMPTS, NUM_NEW)
    leave_program(config_of(flags), directory)
    found = in_process_without_torch(flags, directory)
    assert found == {"tokens": expected, "has_torch": False}


def test_sampled_tokens_and_facts_are_those_of_an_ordinary_start(directory: Path) -> None:
    config = config_of(FLAGS)
    leave_program(config, directory)
    fresh, stored = ordinary(config, directory), started(config, directory)
    sampling = SamplingParams(temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, ignore_eos=True)
    assert decode(stored, PROMPTS, NUM_NEW, sampling) == decode(fresh, PROMPTS, NUM_NEW, sampling)
    assert not stored.has_resumed
    for name in ("model", "kv", "max_num_seqs", "kernels", "weight_bytes", "device_name", "num_stages"):
        mine, theirs = getattr(stored.facts, name), getattr(fresh.facts, name)
        if name == "kv":  # what is free changes
            mine, theirs = mine.num_blocks, theirs.num_blocks
        assert mine == theirs, name


def started(config: EngineConfig, directory: Path) -> StoredRunner:
    runner = start(config, directory)
    assert isinstance(runner, StoredRunner)
    return runner


def test_a_request_that_needs_more_does_not_disturb_the_others(
    tiny: tuple[Path, Any], directory: Path
) -> None:
    config = config_of(FLAGS)
    leave_program(config, directory)
    runner = started(config, directory)
    decode(runner, PROMPTS[:2], 3)
    asks = SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.0)
    plan = StepPlan(
        step_id=4,
        last_result_seen=3,
        new_rows=(enter(2, PROMPTS[2], 4, asks),),
        chunk_slots=np.array([2], np.uint32),
        chunk_lengths=np.array([len(PROMPTS[2])], np.uint32),
    )
    results = [runner.execute(plan)]
    assert runner.has_resumed
    results += [
        runner.execute(StepPlan(step_id=step, last_result_seen=step - 1)) for step in range(5, NUM_NEW + 1)
    ]
    tokens = np.stack([result.token_ids for result in results], axis=1).tolist()
    expected = [greedy_tokens(tiny[1], prompt, NUM_NEW) for prompt in PROMPTS]
    assert tokens == [expected[0][3:], expected[1][3:], expected[2][: NUM_NEW - 3]]
    assert results[0].logprobs is not None
    assert results[0].logprobs.rows.tolist() == [2]


def test_others_go_on_while_the_model_is_loaded(
    tiny: tuple[Path, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(FLAGS)
    leave_program(config, directory)
    runner, may_load, fails = started(config, directory), threading.Event(), [True]

    def load(*arguments: Any) -> Resume:
        assert may_load.wait(60)
        if fails:
            fails.clear()
            raise ModelError("the file is gone")
        return load_to_resume(*arguments)

    monkeypatch.setattr(create, "load_to_resume", load)
    tokens = [decode(runner, PROMPTS[:1], 1)[0]]
    asks = SamplingParams(temperature=0.0, logprobs=2)
    slots, lengths = np.array([1], np.uint32), np.array([len(PROMPTS[1])], np.uint32)

    def ask(step_id: int, removed: Sequence[int]) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            last_result_seen=step_id - 1,
            removed_slots=np.array(removed, np.uint32),
            new_rows=(enter(1, PROMPTS[1], step_id, asks),),
            chunk_slots=slots,
            chunk_lengths=lengths,
            may_defer_rows=True,
        )

    for step_id in (2, 3):  # it is asked twice, and sent back twice
        result = runner.execute(ask(step_id, [1] * (step_id > 2)))
        assert result.row_errors[RowKey(1, step_id)].is_deferral
        tokens[0].append(int(result.token_ids[0]))
        assert not runner.has_resumed
    may_load.set()
    assert runner._loading is not None
    with pytest.raises(ModelError, match="the file is gone"):
        runner._loading.result(60)
    with pytest.raises(ModelError, match="the file is gone"):
        runner.prepare(ask(4, [1]))
    result = runner.execute(
        StepPlan(step_id=4, last_result_seen=3)
    )  # the row that was sent back is still there
    tokens[0].append(int(result.token_ids[0]))
    runner.prepare(ask(5, [1]))  # it tries again
    assert runner._loading is not None
    runner._loading.result(60)
    entering = replace(ask(5, []), new_rows=(enter(2, PROMPTS[1], 5, asks),), chunk_slots=slots + 1)
    results = [runner.execute(entering)]
    assert runner.has_resumed, (
        "also beside a row that was sent back and is still there: others may follow for ever"
    )
    assert not results[0].row_errors
    assert results[0].logprobs is not None
    assert results[0].logprobs.rows.tolist() == [2]
    results += [runner.execute(StepPlan(step_id=step, last_result_seen=step - 1)) for step in (6, 7)]
    last = StepPlan(step_id=8, last_result_seen=7, removed_slots=np.array([1], np.uint32))
    rest = np.stack([result.token_ids for result in results], axis=1).tolist()
    rest[0] += [int(runner.execute(last).token_ids[0])]
    expected = [greedy_tokens(tiny[1], prompt, NUM_NEW) for prompt in PROMPTS[:2]]
    assert [tokens[0] + rest[0], rest[2]] == [expected[0], expected[1][:3]]


@pytest.mark.thorough
def test_states_are_kept_where_torch_takes_over(tmp_path: Path, directory: Path) -> None:
    oracle = save_checkpoint(RECURRENT_FAMILIES["Falcon-H1"].create(), tmp_path / "hybrid")
    config = config_of(FLAGS | {"cache.num_blocks": 65, "cache.state_interval": 16})
    leave_program(config, tmp_path / "hybrid")
    runner = started(config, tmp_path / "hybrid")
    begun = decode(runner, PROMPTS, 3)
    runner.block_store()
    assert runner.has_resumed
    plans = (StepPlan(step_id=step, last_result_seen=step - 1) for step in range(4, NUM_NEW + 1))
    rest = np.stack([runner.execute(plan).token_ids for plan in plans], axis=1).tolist()
    said = [first + others for first, others in zip(begun, rest, strict=True)]
    assert said == [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.mark.thorough
@pytest.mark.parametrize("takes_over", [False, True])
def test_guesses_of_states_are_kept_where_torch_takes_over(
    takes_over: bool, tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes on behind a step of which the states lack the guesses that were right."""
    family, most = tmp_path / "hybrid", 2
    oracle = save_checkpoint(RECURRENT_FAMILIES["Falcon-H1"].create(), family)
    expected = [greedy_tokens(oracle, prompt, NUM_NEW) for prompt in PROMPTS]
    wrong_last = changes(Random(2), SIZES["vocab_size"])["some"]
    known = dict(enumerate(expected))
    monkeypatch.setitem(drafting._OWN, "ngram", lambda s: Replaying(s.history, known, wrong_last))
    config = config_of(
        FLAGS
        | {"cache.num_blocks": 65, "cache.state_interval": 16}
        | {"speculative.max_tokens": most, "speculative.proposers": "ngram"}
    )
    leave_program(config, family)
    runner = started(config, family)
    assert runner.facts.max_samples_per_row == 1 + most
    assert runner._speculation is not None
    guess_at_all_costs(runner._speculation, most)
    said = decode(runner, PROMPTS, 1)
    slots, num_steps, num_right = range(len(PROMPTS)), 1, 0
    while left := {slot: NUM_NEW - len(said[slot]) for slot in slots if len(said[slot]) < NUM_NEW}:
        num_steps += 1
        limits = {slot: min(most + 1, num) for slot, num in left.items() if num > 1}
        if takes_over and num_right and not runner.has_resumed:
            runner.block_store()
            assert runner.has_resumed
        result = runner.execute(
            StepPlan(
                step_id=num_steps,
                last_result_seen=num_steps - 1,
                skipped_slots=np.array([slot for slot in slots if slot not in left], np.uint32),
                sample_slots=np.array(list(limits), np.uint32),
                sample_limits=np.array(list(limits.values()), np.uint32),
            )
        )
        token_ids = iter(result.token_ids.tolist())
        counts = result.token_counts.tolist() or [1] * len(left)
        for slot, count in zip(left, counts, strict=True):
            said[slot] += [next(token_ids) for _ in range(count)]
            num_right += count - 1
    assert said == expected
    assert num_right > len(PROMPTS)
    assert runner.has_resumed == takes_over


@pytest.mark.thorough
def test_it_sleeps_and_wakes(tiny: tuple[Path, Any], directory: Path) -> None:
    config = config_of(FLAGS)
    leave_program(config, directory)
    runner = started(config, directory)
    runner.sleep(SleepLevel.WEIGHTS_DROPPED)
    runner.wake()
    assert decode(runner, PROMPTS[:1], NUM_NEW) == [greedy_tokens(tiny[1], PROMPTS[0], NUM_NEW)]


def cut(content: bytearray) -> bytearray:
    return content[:-100]


def cut_in_header(content: bytearray) -> bytearray:
    return content[:200]


def longer(content: bytearray) -> bytearray:
    return content + b"more"


def damaged(content: bytearray) -> bytearray:
    content[300] ^= 1
    return content


def foreign(content: bytearray) -> bytearray:
    return bytearray(b"something else" * 1000)


@pytest.mark.parametrize("change", [cut, cut_in_header, longer, damaged, foreign])
def test_a_file_that_is_not_whole_is_refused_and_written_anew(
    directory: Path, change: Callable[[bytearray], bytearray], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(FLAGS)
    path = leave_program(config, directory)
    path.write_bytes(change(bytearray(path.read_bytes())))
    assert start(config, directory) is None
    assert "is not used, and is written anew" in caplog.text
    assert leave_program(config, directory) == path
    assert start(config, directory) is not None


def test_the_program_of_another_key_is_refused(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One file is copied to the name of the other, as by hand."""
    one, other = config_of(FLAGS), config_of(FLAGS | {"scheduler.max_num_seqs": 4})
    paths = [leave_program(config, directory) for config in (one, other)]
    assert paths[0] != paths[1]
    shutil.copy(paths[0], paths[1])
    assert start(other, directory) is None
    assert "it is of another key" in caplog.text


@pytest.fixture
def changed(tiny: tuple[Path, Any], tmp_path: Path) -> Iterator[Path]:
    """A copy of the checkpoint, to be changed."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny[0], copy)
    return copy


def test_a_checkpoint_with_other_weights_is_recorded_anew(directory: Path, changed: Path) -> None:
    config = config_of(FLAGS)
    leave_program(config, changed)
    assert start(config, changed) is not None
    weights = changed / "model.safetensors"
    stat, content = weights.stat(), bytearray(weights.read_bytes())
    content[-8:] = bytes(8)
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # only its bytes differ
    assert start(config, changed) is None


def test_nothing_is_stored_of_weights_that_were_replaced_meanwhile(directory: Path, tmp_path: Path) -> None:
    """The file would be found under the key of the new weights, and hold the old ones."""
    own = tmp_path / "own"
    shutil.copytree(directory, own)
    config = config_of(FLAGS)
    resolved, runner = resolve_config(config, read_architecture(own)), ordinary(config, own)
    weights = own / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000:] = bytes(1000)
    weights.write_bytes(content)
    with pytest.raises(ModelError, match="another model than this worker"):
        store(runner, resolved, own)
    assert not programs_directory().exists()


def test_nothing_is_stored_where_that_is_off(directory: Path) -> None:
    config = config_of(FLAGS | {"worker.stored_programs_gib": 0})
    resolved = resolve_config(config, read_architecture(directory))
    assert store_later(ordinary(config, directory), resolved, directory) is None
    assert not programs_directory().exists()


def test_a_program_above_the_limit_is_not_stored(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = config_of(FLAGS | {"worker.stored_programs_gib": 1e-6})
    resolved = resolve_config(config, read_architecture(directory))
    assert store(ordinary(config, directory), resolved, directory) is None
    assert "worker.stored_programs_gib = 1e-06" in caplog.text


def test_a_full_disk_leaves_nothing_and_is_no_failure(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(image.os, "fsync", fail)
    config = config_of(FLAGS)
    resolved = resolve_config(config, read_architecture(directory))
    thread = store_later(ordinary(config, directory), resolved, directory)
    assert thread is not None
    thread.join(60)
    assert "cannot be stored" in caplog.text
    assert "No space left" in caplog.text
    assert list(programs_directory().iterdir()) == []


def test_a_pooled_row_makes_torch_take_over(directory: Path) -> None:
    config = config_of(FLAGS)
    leave_program(config, directory)
    stored, fresh = started(config, directory), ordinary(config, directory)
    assert stored.facts.model.tasks == fresh.facts.model.tasks == ("generate", "embed", "token_embed")
    assert stored.facts.model.embedding_size == fresh.facts.model.embedding_size
    generating = new_row(0, PROMPTS[0], range(1, 5))
    pooled = new_row(1, PROMPTS[1], range(5, 9))
    pooled = replace(pooled, content=replace(pooled.content, pooling=PoolingParams()))
    plans = [
        step_plan(1, new=[generating], chunks={0: len(PROMPTS[0])}),
        step_plan(2, new=[pooled], chunks={1: len(PROMPTS[1])}),
        step_plan(3, removed=[1]),
    ]
    for runner in (stored, fresh):
        runner.reset()
    results = [stored.execute(plans[0])]
    assert not stored.has_resumed
    results += [stored.execute(plan) for plan in plans[1:]]
    assert stored.has_resumed
    expected = [fresh.execute(plan) for plan in plans]
    assert [result.token_ids.tolist() for result in results] == [
        result.token_ids.tolist() for result in expected
    ]
    assert set(results[1].vectors) == {pooled.key}
    np.testing.assert_array_equal(results[1].vectors[pooled.key], expected[1].vectors[pooled.key])


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_a_model_that_only_pools_leaves_no_program(tmp_path: Path, head: str) -> None:
    save_decoder(tmp_path, "Qwen3", head)
    config = config_of(FLAGS)
    runner = ordinary(config, tmp_path)
    assert runner.runner.recorded() is None
    assert pool(runner, [[5, 6, 7]], PoolingParams())[0].shape == (1, 64)


def test_files_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        file = tmp_path / f"{name}.program"
        file.write_bytes(bytes(100))
        os.utime(file, (1000.0 - age, 1000.0 - age))
    assert make_room(tmp_path, 150, 300, now_s=2000.0)
    assert [file.name for file in tmp_path.iterdir()] == ["new.program"]
    assert not make_room(tmp_path, 301, 300, now_s=2000.0)
    assert (tmp_path / "new.program").exists()


OF_THE_WORKER = {
    **{
        name: spec.trial
        for name, spec in SAMPLING_FIELDS.items()
        if spec.trial is not None and not spec.column
    },
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logprob_token_ids": (3,),
    "thinking_token_budget": 5,
}


@pytest.mark.parametrize("name", sorted(OF_THE_WORKER))
def test_what_takes_torch_is_not_plain(name: str) -> None:
    assert is_plain(SamplingParams(temperature=0.7, top_k=5, stop=["x"], max_tokens=9, seed=1))
    assert not is_plain(SamplingParams(**{name: OF_THE_WORKER[name]}))
