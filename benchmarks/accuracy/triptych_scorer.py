"""Triptych's runner, called in process, in any mode that the config can express."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.accuracy.base import Pass, Scores
from benchmarks.worker.session import checked
from tests.oracle.entries import Entry
from triptych.config.loader import load_config
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, StepResult
from triptych_services.worker.runner.base import Runner
from triptych_services.worker.service.startup import load_runner

_PROMPT_LOGPROBS = SamplingParams(temperature=0.0, prompt_logprobs=0)


class TriptychScorer:
    def __init__(self, mode: Mapping[str, str]) -> None:
        """Take a mode as keys of the config and their values."""
        self._mode = mode

    @property
    def name(self) -> str:
        return f"triptych {' '.join(f'{key}={text}' for key, text in self._mode.items())}"

    def score(self, entries: Sequence[Entry]) -> Iterator[tuple[Pass, list[Scores]]]:
        lengths = [len(entry.prompt) + len(entry.tokens) for entry in entries]
        fitting = {
            "model.max_model_len": str(max(lengths) + 1),  # a prompt's end gives one more token
            "scheduler.max_num_seqs": str(len(entries)),
            "scheduler.max_num_batched_tokens": str(max(*lengths, 2048)),
        }
        runner = load_runner(
            load_config(env={}, flags={**fitting, **self._mode}), lambda phase, progress: None
        )
        yield Pass.WHOLE, [_whole(runner, entry) for entry in entries]
        yield Pass.TOKENS, _token_by_token(runner, entries)


def _whole(runner: Runner, entry: Entry) -> Scores:
    """Score one continuation as the end of a prompt, computed in one step."""
    num_tokens = len(entry.tokens)
    sequence = entry.prompt + entry.tokens
    row = _row(runner, 0, 1, sequence, [], _PROMPT_LOGPROBS)
    result = _execute(runner, [row], {0: len(sequence)})
    scored = result.prompt_logprobs[row.key]
    return Scores(
        scored.logprobs[-num_tokens:, 0].astype(np.float64),
        scored.ranks[-num_tokens:] == 1,
    )


def _token_by_token(runner: Runner, entries: Sequence[Entry]) -> list[Scores]:
    """Score all continuations as they are served: prompts one by one, then all rows decode together.

    `allowed_token_ids` forces the token of a row, and log-probabilities are taken before any mask. Each step has
    rows of its own, as after a preemption that left the blocks in place, so that each row may force another token.
    """
    num_tokens = len(entries[0].tokens)
    lengths = [len(entry.prompt) + num_tokens for entry in entries]
    num_blocks = [-(-length // runner.facts.kv.block_size) for length in lengths]
    first_blocks = 1 + np.cumsum([0, *num_blocks])
    logprobs = np.empty((len(entries), num_tokens))
    is_best = np.empty((len(entries), num_tokens), bool)
    for at in range(num_tokens):
        rows = [
            _row(
                runner, slot, int(first_blocks[slot]), entry.prompt, entry.tokens[:at],
                SamplingParams(logprobs=0, allowed_token_ids=(entry.tokens[at],)),
            )
            for slot, entry in enumerate(entries)
        ]  # fmt: skip
        steps = [[row] for row in rows] if at == 0 else [rows]
        for step in steps:
            chunks = {row.slot: row.num_known_tokens - row.num_computed_tokens for row in step}
            columns = _execute(runner, step, chunks).logprobs
            assert columns is not None
            slots = [row.slot for row in step]
            logprobs[slots, at] = columns.logprobs[columns.offsets[:-1]]
            is_best[slots, at] = columns.ranks == 1
    return [Scores(*scores) for scores in zip(logprobs, is_best, strict=True)]


def _row(
    runner: Runner,
    slot: int,
    first_block: int,
    prompt: Sequence[int],
    emitted: Sequence[int],
    sampling: SamplingParams,
) -> NewRow:
    """Return a row of which everything but the last emitted token is in its blocks, or nothing if none is emitted."""
    num_known = len(prompt) + len(emitted)
    num_blocks = -(-num_known // runner.facts.kv.block_size)
    num_computed = num_known - 1 if emitted else 0
    return NewRow(
        slot=slot,
        slot_version=0,
        content=RowContent(np.array(prompt, np.uint32), sampling),
        emitted_token_ids=np.array(emitted, np.uint32),
        num_computed_tokens=num_computed,
        num_cached_tokens=num_computed,
        block_ids=np.arange(first_block, first_block + num_blocks, dtype=np.uint32),
        seed=0,
    )


def _execute(runner: Runner, rows: Sequence[NewRow], slot_to_chunk: Mapping[int, int]) -> StepResult:
    """Compute one step of a session of its own; the runner's keys and values stay."""
    runner.reset()
    chunks = {slot: length for slot, length in slot_to_chunk.items() if length != 1}
    plan = StepPlan(
        step_id=1,
        last_result_seen=0,
        new_rows=tuple(rows),
        chunk_slots=np.array(list(chunks), np.uint32),
        chunk_lengths=np.array(list(chunks.values()), np.uint32),
    )
    return checked(runner.execute(plan))
