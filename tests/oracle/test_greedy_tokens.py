"""Greedy tokens of the real model in float32 equal transformers', six ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.helpers.cores import share_of_cores
from tests.helpers.in_process import InProcessEngine
from tests.oracle.entries import NUM_NEW_TOKENS, QUANTIZED_NEAR_TIE, Entry, check, read_entries
from tests.oracle.prompts import oracle_prompts
from tests.worker.runner.drafting.guessing import Replaying, changes, guess_at_all_costs
from triptych.checkpoint.config_json import read_architecture
from triptych.config.loader import load_config
from triptych.hub import resolve_model
from triptych.text.chat_template import ChatTemplate
from triptych.text.tokenizer import Tokenizer
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.runner.drafting import create as drafting
from triptych_services.worker.runner.startup.create import create_runner

pytestmark = pytest.mark.model

MAX_EXCUSED = 2  # of the 100 runs
MAX_MODEL_LEN = 1600
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
STEP_TO_TOO_FEW_BLOCKS = {1: MAX_MODEL_LEN // 16 + 1, 4: 40}
EACH_OR_FEW = pytest.mark.parametrize(
    "step",
    [pytest.param(4, id="few"), pytest.param(1, id="each", marks=pytest.mark.slow)],
)
"""Which entries are computed in a way that takes long: every fourth, or all of them."""
QUICK_OR_EACH = pytest.mark.parametrize(
    "step",
    [pytest.param(4, id="few"), pytest.param(1, id="each", marks=pytest.mark.thorough)],
)
"""Which entries are computed in the ways that take less."""


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model("embedded")


@pytest.fixture(scope="module")
def entries(directory: Path) -> list[Entry]:
    return read_entries(directory)


def make_runner(
    directory: Path,
    dtype: str,
    quantization: str = "none",
    cache_dtype: str = "auto",
    activation_bits: str = "auto",
    batch_invariant: str = "auto",
    proposers: str = "grammar,ngram,suffix",
) -> Runner:
    config = load_config(
        env={},
        flags={
            "model.dtype": dtype,
            "model.quantization": quantization,
            "model.activation_bits": activation_bits,
            "model.batch_invariant": batch_invariant,
            "cache.dtype": cache_dtype,
            "speculative.enabled": "auto",
            "speculative.proposers": proposers,
            "model.max_model_len": str(MAX_MODEL_LEN),
            "cache.num_blocks": "640",
            "scheduler.max_num_seqs": str(NUM_NEW_TOKENS),
            "worker.num_threads": str(share_of_cores()),
        },
    )
    resolved = resolve_config(config, read_architecture(directory))
    return create_runner(resolved, directory, boot_id="test", on_phase=lambda phase, progress: None)


@pytest.fixture(scope="module")
def runner(directory: Path) -> Runner:
    return make_runner(directory, "float32")


@pytest.fixture(scope="module")
def excused() -> Iterator[list[str]]:
    """Divergences at a near tie, over all ways."""
    found: list[str] = []
    yield found
    assert len(found) <= MAX_EXCUSED, f"too many excused divergences: {found}"


def test_the_oracle_was_recorded_from_these_prompts(directory: Path, entries: list[Entry]) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    prompts = oracle_prompts(tokenizer, ChatTemplate(tokenizer).render)
    assert [entry.prompt for entry in entries] == prompts
    assert len(entries) >= 20
    assert {1, 1500} <= {len(prompt) for prompt in prompts}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(8, id="few"),
        pytest.param(4, id="some", marks=pytest.mark.thorough),
        pytest.param(1, id="each", marks=pytest.mark.slow),
    ],
)
def test_alone(runner: Runner, entries: list[Entry], excused: list[str], step: int) -> None:
    engine = InProcessEngine(runner, enable_prefix_caching=False)
    outputs = [engine.generate([entry.prompt], GREEDY)[0] for entry in entries[::step]]
    check("alone", entries[::step], outputs, excused)


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", ["none", "q4"])
def test_guesses_that_are_often_wrong(
    directory: Path,
    entries: list[Entry],
    excused: list[str],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str,
) -> None:
    """Each step verifies up to eight guesses of each entry, of which three in ten are wrong."""
    prompts = [entry.prompt for entry in entries[::4]]
    known = defaultdict[int, list[int]](list)  # nothing of the rows that warm it up
    change = changes(Random(2), 1000)["some"]
    monkeypatch.setitem(drafting._OWN, "ngram", lambda sources: Replaying(sources.history, known, change))
    runner = make_runner(directory, "float32", quantization, proposers="ngram")
    guess_at_all_costs(runner._runner._speculation, 8)  # type: ignore[attr-defined]
    alone = InProcessEngine(runner).generate(prompts, replace(GREEDY, speculation=False))
    known |= dict(enumerate(alone))
    engine = InProcessEngine(runner)
    outputs = engine.generate(prompts, GREEDY)
    assert outputs == alone
    if quantization == "none":
        check("guessed", entries[::4], outputs, excused)
    counters = engine.scheduler.counters
    assert 0.2 < counters.num_accepted_guesses / counters.num_guesses < 0.8


@QUICK_OR_EACH
def test_all_at_once_and_again_with_prefix_hits(
    runner: Runner, entries: list[Entry], excused: list[str], step: int
) -> None:
    entries = entries[::step]
    engine = InProcessEngine(runner)
    prompts = [entry.prompt for entry in entries]
    check("all at once", entries, engine.generate(prompts, GREEDY), excused)
    hits_before = engine.scheduler.counters.prefix_hits
    outputs = engine.generate(prompts, GREEDY, first_number=len(prompts))
    num_full = sum(len(prompt) // 16 * 16 for prompt in prompts)
    assert engine.scheduler.counters.prefix_hits - hits_before >= num_full - len(prompts)
    check("with prefix hits", entries, outputs, excused)


@pytest.mark.thorough
@QUICK_OR_EACH
def test_in_chunks(runner: Runner, entries: list[Entry], excused: list[str], step: int) -> None:
    entries = entries[::step]
    engine = InProcessEngine(runner, enable_prefix_caching=False, max_num_batched_tokens=64)
    outputs = engine.generate([entry.prompt for entry in entries], GREEDY)
    assert engine.scheduler.counters.num_steps > sum(len(entry.prompt) for entry in entries) / 64
    check("in chunks", entries, outputs, excused)


@pytest.mark.thorough
@EACH_OR_FEW
def test_with_preemptions(runner: Runner, entries: list[Entry], excused: list[str], step: int) -> None:
    entries = entries[::step]
    longest = max(len(entry.prompt) for entry in entries) + NUM_NEW_TOKENS
    engine = InProcessEngine(
        runner, enable_prefix_caching=False, num_blocks=STEP_TO_TOO_FEW_BLOCKS[step], max_model_len=longest
    )
    outputs = engine.generate([entry.prompt for entry in entries], GREEDY)
    assert engine.scheduler.counters.num_preemptions > 0
    check("with preemptions", entries, outputs, excused)


@QUICK_OR_EACH
def test_in_the_files_own_4_bit_blocks(directory: Path, entries: list[Entry], step: int) -> None:
    entries, excused = entries[::step], list[str]()
    engine = InProcessEngine(
        make_runner(directory, "float32", "q4", activation_bits="16"), enable_prefix_caching=False
    )
    outputs = engine.generate([entry.prompt for entry in entries], GREEDY)
    check("in 4 bits", entries, outputs, excused, near_tie=QUANTIZED_NEAR_TIE)
    assert len(excused) <= MAX_EXCUSED, f"too many excused divergences: {excused}"
