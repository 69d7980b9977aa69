"""Guesses change no token and no log-probability of any family of models, in float32 and in bfloat16.

Queries of several tokens take other ways through attention, routers and convolutions than those of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import random_prompts, save_checkpoint
from tests.worker.models.families import FAMILIES
from tests.worker.models.recurrent_families import RECURRENT_FAMILIES
from tests.worker.runner.drafting.guessing import Replaying, changes, guess_at_all_costs
from tests.worker.runner.drafting.mtp_checkpoints import save_cycle
from triptych.checkpoint.config_json import read_architecture
from triptych.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from triptych.types.sampling import SamplingParams
from triptych.types.step import StepPlan, StepResult
from triptych_kernels.cpu.library import isa
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.base import CompletedStep, do_nothing
from triptych_services.worker.runner.drafting import create as drafting
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = pytest.mark.skipif(not isa(), reason="no native kernels are built for this processor")

ALL = {**FAMILIES, **RECURRENT_FAMILIES}
OF_EACH_MIXER = ("Mamba", "Falcon-H1", "Qwen3-Next", "LFM2")
CASES = [(name, "float32") for name in ALL] + [(name, "bfloat16") for name in (*FAMILIES, *OF_EACH_MIXER)]
NUM_NEW, MOST_GUESSES = 14, 4
PROMPTS = random_prompts(3, 11, 21)
Entry = tuple[list[int], list[float]]


class Recorded:
    """A runner that keeps the log-probabilities of the tokens it has sampled, with those of the likeliest ones."""

    def __init__(self, runner: SleepableRunner) -> None:
        self._runner, self.facts, self.entries = runner, runner.facts, list[Entry]()
        self.prepare, self.reset = runner.prepare, runner.reset
        self.num_steps = 0

    def launch(self, plan: StepPlan, on_prepared=do_nothing) -> CompletedStep:
        result: StepResult = self._runner.launch(plan, on_prepared).wait()
        self.num_steps += 1
        if (columns := result.logprobs) is not None:
            for first, end in zip(columns.offsets[:-1], columns.offsets[1:], strict=True):
                ids, values = columns.token_ids[first:end], columns.logprobs[first:end]
                self.entries.append((ids.tolist(), values.tolist()))
        return CompletedStep(result)


def run(
    directory: Path, dtype: str, *, guesses: bool, proposers: str = "ngram", quantization: str = "none"
) -> tuple[list[list[int]], list[Entry], int]:
    """Return the tokens of each prompt, all log-probabilities, and the number of steps."""
    engine = EngineConfig(
        model=ModelConfig(
            model="somewhere/tiny", dtype=dtype, batch_invariant="true", quantization=quantization
        ),
        cache=CacheConfig(block_size=5, state_interval=25),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1),
        speculative=SpeculativeConfig(
            enabled="true" if guesses else "false", max_tokens=MOST_GUESSES, proposers=proposers
        ),
    )
    config = resolve_config(engine, read_architecture(directory))
    runner = create_runner(config, directory, boot_id="b", on_phase=lambda phase, progress: None)
    if guesses:
        guess_at_all_costs(runner._runner._speculation, MOST_GUESSES)  # type: ignore[union-attr, arg-type]
    recorded = Recorded(runner)
    in_process = InProcessEngine(recorded, max_num_seqs=5)  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=4)
    tokens = in_process.generate(PROMPTS, sampling)
    return tokens, sorted(recorded.entries), recorded.num_steps


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [("Qwen 3.6 MoE", "float32", "none"), ("Qwen 3.5", "bfloat16", "none"), ("Qwen3-Next", "float32", "q4")],
)
def test_a_layer_beside_states_changes_nothing(
    name: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    """It is right by construction, so that steps take several tokens."""
    save_cycle(tmp_path, "state", name, linear_value_head_dim=16)  # of which q4 has whole groups
    tokens, entries, num_steps = run(tmp_path, dtype, guesses=False, quantization=quantization)
    found = run(tmp_path, dtype, guesses=True, proposers="mtp", quantization=quantization)
    assert found[:2] == (tokens, entries)
    assert found[2] < num_steps


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_families_say_the_same(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(ALL[name].create(), tmp_path)
    tokens, entries, num_steps = run(tmp_path, dtype, guesses=False)
    known: dict[int, Sequence[int]] = dict(enumerate(tokens))
    vocab_size = 1 + max(max(row) for row in tokens)
    for change in ("right", "some"):
        change_of = changes(Random(1), vocab_size)[change]
        monkeypatch.setitem(drafting._OWN, "ngram", lambda s, c=change_of: Replaying(s.history, known, c))
        found, found_entries, found_steps = run(tmp_path, dtype, guesses=True)
        assert found == tokens
        assert found_entries == entries
        assert found_steps < num_steps
