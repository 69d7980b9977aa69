"""A runner that gives its memory back and takes it again: the same tokens, and nothing kept that it should not keep."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.in_process import InProcessEngine
from tests.helpers.scheduling import owners_of
from tests.worker.models import checkpoints
from tests.worker.models.checkpoints import SIZES, greedy_tokens, random_prompts, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.sampling_kinds import KINDS
from tests.worker.tiny import new_row, step_plan
from triptych.checkpoint.config_json import read_architecture
from triptych.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WorkerConfig
from triptych.errors import MemoryShort, ModelError
from triptych.types.facts import KvKind, Phase, SleepLevel
from triptych.types.identity import Likeness, compare
from triptych.types.sampling import SamplingParams
from triptych.types.submit import single_choice
from triptych_services.enginecore.request import Request
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.layers import weights
from triptych_services.worker.runner import cpu_backend as create_cpu
from triptych_services.worker.runner import sleepable_runner
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup import create
from triptych_services.worker.runner.startup.create import create_runner

MIB = 1 << 20
NUM_BLOCKS = 2048  # of 16 tokens, 2 layers, 2 heads of 8, float32: 8 MiB
KV_BYTES = NUM_BLOCKS * 16 * 2 * 2 * 2 * 8 * 4
LARGE = 8  # times as many: blocks of a layer that share their memory with nothing else
HOST, DROPPED = SleepLevel


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_checkpoint(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), tmp_path)
    return tmp_path


def make_runner(
    directory: Path, phases: list[str] | None = None, *, quantization: str = "none", times: int = 1
) -> SleepableRunner:
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", quantization=quantization),
        cache=CacheConfig(num_blocks=times * NUM_BLOCKS, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=64),
        worker=WorkerConfig(device="cpu", num_threads=1),
    )
    config = resolve_config(engine, read_architecture(directory))
    phases = [] if phases is None else phases
    return create_runner(config, directory, boot_id="b", on_phase=lambda phase, _: phases.append(phase))


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and blocks in memory that torch allocates, as on a CUDA device; HostCopy takes them from there."""
    monkeypatch.setattr(weights, "can_pack", lambda in_features, dtype: False)
    monkeypatch.setattr(create_cpu, "isa", lambda: "")


def as_on_a_device(runner: SleepableRunner) -> SleepableRunner:
    runner.device = torch.device("meta")  # anything but a CPU, where weights would stay
    return runner


def tokens(runner: SleepableRunner) -> list[list[int]]:
    """Return the tokens of a session with one request of each kind of sampling."""
    runner.reset()
    rows = [
        new_row(slot, range(3 + slot, 9 + slot), range(1 + 4 * slot, 5 + 4 * slot), sampling=kind, seed=slot)
        for slot, kind in enumerate(list(KINDS.values())[:10])
    ]
    first = step_plan(1, new=rows, chunks={row.slot: 6 for row in rows})
    plans = [first, *(step_plan(step_id) for step_id in range(2, 20))]
    return [runner.execute(plan).token_ids.tolist() for plan in plans]


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_the_tokens_after_a_sleep_are_those_before(directory: Path, quantization: str) -> None:
    phases: list[str] = []
    runner = make_runner(directory, phases, quantization=quantization)
    expected, facts = tokens(runner), runner.facts
    assert len({tuple(step) for step in expected}) > 5
    for level, expected_phases in ((HOST, {Phase.WARMING}), (DROPPED, {Phase.LOADING, Phase.WARMING})):
        runner.sleep(level)
        assert runner.facts == facts
        phases.clear()
        runner.wake()
        assert set(phases) == expected_phases
        assert tokens(runner) == expected
        assert runner.facts == facts


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("level", [HOST, DROPPED])
@pytest.mark.parametrize("name", ["Gemma 3", "LFM2"])
def test_requests_of_several_groups_go_on_after_a_sleep(name: str, level: SleepLevel, tmp_path: Path) -> None:
    """Windows and recurrent states: what was computed before the sleep is computed again, and nothing else is read."""
    oracle = save_checkpoint((FAMILIES | RECURRENT_FAMILIES)[name].create(), tmp_path)
    runner = checkpoints.make_runner(tmp_path)
    kinds = {group.kind for group in runner.facts.kv.groups}
    assert kinds == {KvKind.FULL, KvKind.WINDOW if name == "Gemma 3" else KvKind.STATE}
    scheduler = InProcessEngine(runner).scheduler
    prompts, num_new = random_prompts(4, 17, 23), 12
    sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        submit = single_choice(number, f"r{number}", prompt, sampling, seed=0)
        scheduler.requests.add(*Request.choices_of(submit, session=0))
    said: list[list[int]] = [[] for _ in prompts]
    has_slept = False
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        output = scheduler.update(runner.execute(plan))
        for (_, number), token in zip(owners_of(output), output.token_ids.tolist(), strict=True):
            said[number].append(token)
        if not has_slept and all(len(tokens) > 3 for tokens in said):
            has_slept = True
            scheduler.requeue_all()
            runner.sleep(level)
            runner.wake()
            runner.reset()
    assert has_slept
    assert said == [greedy_tokens(oracle, prompt, num_new) for prompt in prompts]


@pytest.mark.parametrize("level", [HOST, DROPPED])
def test_a_sleep_gives_up_keys_and_values_and_dropped_weights(
    directory: Path, level: SleepLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[weakref.ref[torch.Tensor]] = []

    def allocate(*arguments, **options):
        allocated = allocate_kv_cache(*arguments, **options)
        for cache in allocated:
            cache.blocks.fill_(1.0)  # only what has been written takes memory
            caches.append(weakref.ref(cache.blocks))
        return allocated

    allocate_kv_cache = create.allocate_kv_cache
    monkeypatch.setattr(create, "allocate_kv_cache", allocate)
    runner = make_runner(directory, times=LARGE)
    tokens(runner)
    inner, model = weakref.ref(runner._runner), weakref.ref(runner.model)
    assert runner.sleep(level) >= 0.9 * LARGE * KV_BYTES
    assert inner() is None
    assert [cache() for cache in caches] == [None, None]
    assert (model() is None) is (level is DROPPED)
    runner.wake()
    gc.collect()
    assert [cache() is not None for cache in caches] == [False, False, True, True]


@pytest.mark.usefixtures("on_a_device")
def test_weights_wait_on_the_host_while_their_device_has_none(directory: Path) -> None:
    runner = as_on_a_device(make_runner(directory))
    expected, model = tokens(runner), runner.model
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is embedding, "tied"
    for _ in range(2):
        runner.sleep(HOST)
        assert runner.model is model
        assert not any(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
        runner.wake()
        assert model.lm_head.weight is model.model.embed_tokens.weight is head
        assert tokens(runner) == expected
    runner.sleep(DROPPED)
    runner.wake()
    assert runner.model is not model
    assert tokens(runner) == expected


@pytest.fixture(params=[(HOST, "cpu"), (DROPPED, "cpu"), (HOST, "device")], ids=str)
def sleeper(request: pytest.FixtureRequest, directory: Path) -> tuple[SleepableRunner, list]:
    """Asleep, and its tokens when it was awake."""
    level, where = request.param
    if where == "device":
        request.getfixturevalue("on_a_device")
    runner = make_runner(directory)
    if where == "device":
        as_on_a_device(runner)
    expected = tokens(runner)
    runner.sleep(level)
    return runner, expected


def test_waking_without_memory_names_figures_and_is_repeatable(
    sleeper: tuple[SleepableRunner, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, expected = sleeper
    with monkeypatch.context() as patch:
        patch.setattr(sleepable_runner, "free_memory", lambda device: 3 * MIB)
        for _ in range(2):
            takes, of_which = (
                r"waking takes [89] MiB on \w+, but 3 MiB are free",
                f"KV cache {KV_BYTES // MIB},",
            )
            with pytest.raises(MemoryShort, match=rf"{takes} .*{of_which} .* wake the worker again"):
                runner.wake()
    runner.wake()
    assert tokens(runner) == expected


def test_a_failed_wake_frees_its_memory_and_can_be_repeated(
    sleeper: tuple[SleepableRunner, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, expected = sleeper
    started: list[weakref.ref[torch.Tensor]] = []

    def warm_up(inner) -> None:
        started.append(weakref.ref(inner))
        raise torch.OutOfMemoryError("told to")

    storages = [] if runner._model is None else list(runner._model.parameters())
    held = [parameter.untyped_storage().nbytes() for parameter in storages]
    with monkeypatch.context() as patch:
        patch.setattr(create, "warm_up", warm_up)
        with pytest.raises(MemoryShort, match="waking takes"):
            runner.wake()
    assert started[0]() is None, "what it has taken is kept by the error"
    assert [parameter.untyped_storage().nbytes() for parameter in storages] == held
    runner.wake()
    assert tokens(runner) == expected


def test_waking_takes_new_weights_but_no_other_model(directory: Path) -> None:
    runner = make_runner(directory)
    expected = tokens(runner)
    runner.sleep(DROPPED)
    config, file = directory / "config.json", directory / "model.safetensors"
    kept = config.read_bytes(), file.read_bytes()
    save_checkpoint(LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 99})), directory)
    with pytest.raises(ModelError, match="another model now"):
        runner.wake()
    os.unlink(file)
    with pytest.raises(ModelError):
        runner.wake()
    changed = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    save_checkpoint(changed, directory)
    with torch.no_grad():
        changed.model.embed_tokens.weight.neg_()
    changed.save_pretrained(directory)
    before = runner.facts.model.identity
    runner.wake()
    assert tokens(runner) != expected
    after = compare(before, runner.facts.model.identity)
    assert after.likeness is Likeness.FORM, "requests that began with other weights are given up"
    runner.sleep(DROPPED)
    config.write_bytes(kept[0])
    file.write_bytes(kept[1])
    runner.wake()
    assert tokens(runner) == expected
