"""Workers with heads that guess from the model's states, and what others say that these guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.helpers.in_process import InProcessEngine
from tests.worker.models.checkpoints import random_prompts
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
from triptych.types.sampling import SamplingParams
from triptych_services.worker.context.device import resolve_config
from triptych_services.worker.runner.drafting.base import I64, Guesses
from triptych_services.worker.runner.drafting.heads import HeadProposer
from triptych_services.worker.runner.sleepable_runner import SleepableRunner
from triptych_services.worker.runner.startup.create import create_runner

NUM_NEW, MOST_GUESSES, MAX_SEQS = 14, 4, 4
PROMPTS = random_prompts(3, 11, 21)
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)


class HeadOracle(Protocol):
    """A model and its head, as something else computes them."""

    def guesses(self, text: Sequence[int], count: int, first: int) -> list[int]:
        """Return the head's guesses behind a text, greedily, each from the one before.

        Args:
            first: The position of the first state that the head sees.
        """


def start(
    directory: Path,
    *,
    proposers: str = "mtp",
    head: Path | None = None,
    cache_gib: float = 1.0,
    enforce_eager: bool = False,
    **model: Any,
) -> SleepableRunner:
    """Start a worker of which a step has up to 16 tokens; empty `proposers`: it does not guess."""
    options = {"dtype": "float32", "batch_invariant": "true", **model}
    engine = EngineConfig(
        model=ModelConfig(model="somewhere/tiny", **options),
        cache=CacheConfig(block_size=5, num_blocks=40, state_interval=25),
        scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=16),
        worker=WorkerConfig(device="cpu", num_threads=1, enforce_eager=enforce_eager),
        speculative=SpeculativeConfig(
            enabled="auto" if proposers else "false",
            max_tokens=MOST_GUESSES,
            cache_gib=cache_gib,
            proposers=proposers or "ngram",
            model="" if head is None else "some/head",
        ),
    )
    config = resolve_config(engine, read_architecture(directory))
    return create_runner(
        config, directory, boot_id="b", on_phase=lambda phase, progress: None, draft_directory=head
    )


def proposer_of(runner: SleepableRunner) -> HeadProposer:
    """Return the proposer of a runner, which guesses at all costs from now on."""
    assert runner.runner._speculation is not None
    guess_at_all_costs(runner.runner._speculation, MOST_GUESSES)
    (proposer,) = runner.runner._speculation._proposers
    assert isinstance(proposer, HeadProposer)
    return proposer


def answers(
    runner: SleepableRunner, sampling: SamplingParams = GREEDY, prompts: list[list[int]] = PROMPTS
) -> tuple[list[list[int]], int, int]:
    """Return the tokens of all prompts, and the numbers of guesses and of right ones."""
    engine = InProcessEngine(runner, max_num_seqs=MAX_SEQS)  # type: ignore[arg-type]
    tokens = engine.generate(prompts, replace(sampling, max_tokens=NUM_NEW, ignore_eos=True))
    counters = engine.scheduler.counters
    runner.reset()
    return tokens, counters.num_guesses, counters.num_accepted_guesses


class Checked:
    """Holds all guesses of a proposer to those of an oracle."""

    def __init__(self, proposer: HeadProposer, oracle: HeadOracle) -> None:
        self._propose, self._history, self._first = proposer.propose, proposer._history, proposer._first
        self._oracle = oracle
        self.firsts: list[int] = []
        """The position at which each row with guesses began."""
        proposer.propose = self.propose  # type: ignore[method-assign]

    def propose(self, slots: I64, limits: I64) -> Guesses:
        guesses = self._propose(slots, limits)
        found = np.split(guesses.token_ids, np.cumsum(guesses.counts)[:-1])
        for slot, tokens in zip(slots.tolist(), found, strict=True):
            if tokens.size:
                text = self._history.token_ids[slot, : self._history.num_known[slot]].tolist()
                self.firsts.append(int(self._first[slot]))
                expected = self._oracle.guesses(text, tokens.size, self.firsts[-1])
                assert tokens.tolist() == expected[: tokens.size]
        return guesses


def note_logits(proposer: HeadProposer) -> list[Any]:
    """Return a list that gets a copy of the logits of each query of a proposer from now on."""
    found: list[Any] = []
    forward = proposer._backend.forward

    def noting(sizes: Any) -> Any:
        output = forward(sizes)
        found.append(output.logits.clone())
        return output

    proposer._backend.forward = noting  # type: ignore[method-assign]
    return found
