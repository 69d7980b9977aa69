"""Starts a worker's runner from a stored program and decodes greedily: in a process of its own, where torch is blocked.

`python -m tests.worker.runner.stored_start CONFIG DIRECTORY NUM_NEW PROMPTS`; all but the directory as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triptych.config import EngineConfig
from triptych.config.loader import load_config
from triptych.types.sampling import SamplingParams
from triptych.types.step import NewRow, RowContent, StepPlan, empty_u32
from triptych_services.worker.runner.base import Runner, StepRunner
from triptych_services.worker.runner.stored.start import start_stored

GREEDY = SamplingParams(temperature=0.0)
BLOCKS_PER_ROW = 4


def start(config: EngineConfig, directory: Path) -> Runner | None:
    """Start from a stored program, or return None if there is none."""
    return start_stored(config, directory, boot_id="stored", on_phase=lambda phase, progress: None)


def config_of(flags: dict[str, Any]) -> EngineConfig:
    """Return the config of these options, whatever the environment says."""
    return load_config(env={}, flags=flags)


def enter(
    slot: int, prompt: Sequence[int], step_id: int, sampling: SamplingParams = GREEDY, num_groups: int = 1
) -> NewRow:
    """Return a row that enters a slot with blocks of its own in each KV group."""
    shape = num_groups, BLOCKS_PER_ROW
    first, *others = (
        1
        + np.arange(num_groups * BLOCKS_PER_ROW, dtype=np.uint32).reshape(shape)
        + np.uint32(slot * num_groups * BLOCKS_PER_ROW)
    )
    return NewRow(
        slot=slot,
        slot_version=step_id,
        content=RowContent(np.array(prompt, np.uint32), sampling),
        emitted_token_ids=empty_u32(),
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=first,
        seed=slot,
        group_block_ids=tuple(others),
    )


def decode(
    runner: StepRunner, prompts: Sequence[Sequence[int]], num_new: int, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """Return the tokens of all prompts, which enter together and go on together."""
    runner.reset()
    num_groups = len(runner.facts.kv.groups)
    rows = tuple(enter(slot, prompt, 1, sampling, num_groups) for slot, prompt in enumerate(prompts))
    slots = np.arange(len(prompts), dtype=np.uint32)
    lengths = np.array([len(prompt) for prompt in prompts], np.uint32)
    plan = StepPlan(step_id=1, last_result_seen=0, new_rows=rows, chunk_slots=slots, chunk_lengths=lengths)
    results = [runner.execute(plan)]
    results += [
        runner.execute(StepPlan(step_id=step_id, last_result_seen=step_id - 1))
        for step_id in range(2, num_new + 1)
    ]
    return np.stack([result.token_ids for result in results], axis=1).tolist()


class NoTorch:
    """A finder that refuses torch."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is blocked")


def _main() -> None:
    sys.meta_path.insert(0, NoTorch())
    flags, directory, num_new, prompts = sys.argv[1:]
    runner = start(config_of(json.loads(flags)), Path(directory))
    tokens = None if runner is None else decode(runner, json.loads(prompts), int(num_new))
    print(json.dumps({"tokens": tokens, "has_torch": "torch" in sys.modules}))


if __name__ == "__main__":
    _main()
